"""Whose KV the cache holds, and why a turn missed it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kv.conftest import NewRequest
from weft.core.request import CacheMiss, Request
from weft.kv.fingerprint import EvictedPrefixes, fingerprint, joined, without
from weft.kv.prefix_cache import PrefixCache


def new_cache(capacity: int = 100, page: int = 1) -> PrefixCache:
    return PrefixCache(capacity, page_size=page, max_rows=4, max_len=capacity, bytes_per_token=2)


def compute(cache: PrefixCache, request: Request, now_s: float = 0.0) -> None:
    cache.attach(request, now_s=now_s)
    cache.extend(request, request.device_len, now_s)
    request.planned_len = request.device_len
    request.advance(request.device_len - request.cached_len)


def items(cache: PrefixCache, request: Request) -> int:
    entry = cache.ledger.entry(request.request_id)
    return 0 if entry is None else entry.items


def test_items_follow_a_request_through_tail_tree_and_eviction(new_request: NewRequest) -> None:
    cache = new_cache()
    request = new_request([1] * 10)
    compute(cache, request)
    assert items(cache, request) == 10 and cache.ledger.bytes(request.request_id) == 20
    cache.cache_unfinished(request)
    assert items(cache, request) == 10
    cache.cache_finished(request)
    assert items(cache, request) == 10  # it has ended, and its KV is still there
    cache.evict(10)
    assert cache.ledger.entry(request.request_id) is None
    cache.check([])


def test_what_was_found_belongs_to_who_computed_it(new_request: NewRequest) -> None:
    cache = new_cache()
    first, second = new_request([1] * 10), new_request([1] * 8 + [2] * 4)
    compute(cache, first)
    cache.cache_finished(first)
    compute(cache, second, now_s=7.0)
    assert (items(cache, first), items(cache, second)) == (10, 4)
    entry = cache.ledger.entry(first.request_id)
    assert entry is not None and entry.last_used_s == 7.0  # somebody started from it
    cache.cache_finished(second)
    cache.check([])


def test_duplicates_are_not_charged_for_long(new_request: NewRequest) -> None:
    cache = new_cache()
    twins = [new_request([1] * 10), new_request([1] * 10)]
    for twin in twins:
        compute(cache, twin)
    assert [items(cache, twin) for twin in twins] == [10, 10]
    for twin in twins:
        cache.cache_unfinished(twin)
    assert [items(cache, twin) for twin in twins] == [10, 0]
    cache.check(twins)


def miss(cache: PrefixCache, request: Request, *, reuse: bool = True) -> CacheMiss | None:
    cache.attach(request, reuse=reuse)
    cache.cache_finished(request)
    return request.miss


@pytest.mark.parametrize("page", [1, 4])
def test_why_a_turn_missed(new_request: NewRequest, page: int) -> None:
    cache = new_cache(200, page)
    known = list(range(1, 41))
    first = new_request(known)
    compute(cache, first)
    cache.cache_finished(first)
    assert miss(cache, new_request(known[:33])) is None
    assert miss(cache, new_request([*known, 7, 7, 7, 7, 7])) == CacheMiss("never_seen", 40)
    assert miss(cache, new_request([*known[:20], 99, 99, 99, 99, 99])) == CacheMiss("diverged", 20)
    assert miss(cache, new_request([77] * 9)) == CacheMiss("never_seen", 0)
    assert miss(cache, new_request(known), reuse=False) == CacheMiss("not_used", 0)
    cache.evict(20)  # the second half, since the first was split off and used since
    assert miss(cache, new_request([*known, 7])) == CacheMiss("evicted", 20)
    cache.flush()
    assert miss(cache, new_request([*known, 7])) == CacheMiss("evicted", 0)
    assert miss(cache, new_request([77] * 9)) == CacheMiss("never_seen", 0)


def test_a_cut_end_is_evicted_too(new_request: NewRequest) -> None:
    cache = new_cache(2000)
    known = [1 + k % 97 for k in range(1500)]
    first = new_request(known, limit=3000)
    compute(cache, first)
    cache.cache_finished(first)
    freed = cache.evict(1)
    assert 0 < freed < 1500
    assert miss(cache, new_request([*known, 7], limit=3000)) == CacheMiss("evicted", 1500 - freed)


def test_fingerprints_add_up_however_a_sequence_is_cut() -> None:
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, 50).astype(np.int32)
    whole = fingerprint(tokens, 0)
    for cut in range(51):
        first, second = fingerprint(tokens[:cut], 0), fingerprint(tokens[cut:], cut)
        assert joined(first, second) == whole
        assert without(whole, second) == first
    swapped = tokens.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert fingerprint(swapped, 0) != whole


def test_the_memory_of_what_was_evicted_is_bounded() -> None:
    evicted = EvictedPrefixes(size=3)
    for k in range(3):
        evicted.add(k, 1)
    evicted.add(0, 1)  # again, so it is the newest
    evicted.add(9, 1)
    assert [(k, 1) in evicted for k in (0, 1, 2, 9)] == [True, False, True, True]


def test_fingerprints_of_negative_keys_tell_their_places() -> None:
    """The keys of media are negative."""
    keys = np.array([-5, -9, 3], dtype=np.int32)
    assert fingerprint(keys, 0) != fingerprint(keys[[1, 0, 2]], 0)
    assert fingerprint(keys[:1], 0) != fingerprint(keys[:1], 1)
    assert joined(fingerprint(keys[:1], 0), fingerprint(keys[1:], 1)) == fingerprint(keys, 0)
