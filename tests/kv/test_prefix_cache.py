"""Slots between free list, tree and live requests. Every test ends with a proof that none was lost."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from tests.kv.conftest import NewCache, NewRequest
from weft.core.errors import InvariantError
from weft.core.request import Request
from weft.kv.prefix_cache import PrefixCache
from weft.kv.radix_tree import Node

PAGES = pytest.mark.parametrize("page", [1, 16, 64])


def compute(cache: PrefixCache, request: Request, up_to: int | None = None) -> None:
    """What a step does: room for the next tokens, and their KV computed."""
    target = request.device_len if up_to is None else up_to
    cache.extend(request, target)
    request.planned_len = target
    request.advance(target - request.cached_len)


def row_of(cache: PrefixCache, request: Request) -> list[int]:
    return cache.rows.table[request.row, : request.cached_len].tolist()


def assert_empty_after_flush(cache: PrefixCache, live: Sequence[Request] = ()) -> None:
    cache.check(live)
    cache.flush()
    cache.check(live)
    assert cache.counts().free == cache.capacity
    assert cache.rows.free_rows == len(cache.rows.table)


@PAGES
def test_a_finished_request_serves_the_next_one(page: int, new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(page * 8, page)
    tokens = list(range(3 * page))
    first = new_request(tokens)
    cache.attach(first)
    assert first.cached_len == 0
    compute(cache, first)
    slots = row_of(cache, first)
    cache.check([first])
    cache.cache_finished(first)
    assert first.row == -1
    assert cache.counts().cached == 3 * page

    second = new_request([*tokens, 7, 7])
    assert cache.peek(second.tokens) == 3 * page
    cache.attach(second)
    assert second.cached_len == 3 * page
    assert row_of(cache, second) == slots
    assert cache.counts().active == 3 * page
    cache.check([second])
    cache.cache_finished(second)
    assert_empty_after_flush(cache)


@PAGES
def test_the_last_prompt_token_is_always_computed(page: int, new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(page * 4, page)
    tokens = list(range(2 * page))
    first = new_request(tokens)
    cache.attach(first)
    compute(cache, first)
    cache.cache_finished(first)
    again = new_request(tokens)
    assert cache.peek(again.tokens) == (2 * page - 1) // page * page
    cache.attach(again)
    assert again.cached_len == (2 * page - 1) // page * page
    assert again.extend_len >= 1
    cache.cache_finished(again)
    assert_empty_after_flush(cache)


def test_reuse_can_be_turned_off(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache()
    for reuse, expected in ((True, 0), (True, 4), (False, 0)):
        request = new_request([1, 2, 3, 4, 5])
        cache.attach(request, reuse=reuse)
        assert request.cached_len == expected
        compute(cache, request)
        cache.check([request])
        cache.cache_finished(request)
    assert cache.counts().cached == 5  # the duplicates are free again
    assert_empty_after_flush(cache)


@PAGES
def test_two_that_computed_the_same(page: int, new_cache: NewCache, new_request: NewRequest) -> None:
    """The slower one's table points at the tree's slots afterwards, and its own are free."""
    cache = new_cache(page * 16, page)
    tokens = list(range(3 * page))
    fast, slow = new_request([*tokens, 1]), new_request([*tokens, 2])
    for request in (fast, slow):
        cache.attach(request)
        compute(cache, request)
    cache.cache_unfinished(fast)
    assert row_of(cache, fast)[: 3 * page] != row_of(cache, slow)[: 3 * page]
    free = cache.counts().free
    cache.cache_unfinished(slow)
    assert row_of(cache, fast)[: 3 * page] == row_of(cache, slow)[: 3 * page]
    assert cache.counts().free == free + 3 * page
    assert row_of(cache, fast)[3 * page] != row_of(cache, slow)[3 * page]
    cache.check([fast, slow])
    cache.cache_finished(fast)
    cache.check([slow])
    cache.cache_finished(slow)
    assert_empty_after_flush(cache)


@PAGES
def test_chunks_are_shared_as_they_come(page: int, new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(page * 16, page)
    tokens = list(range(4 * page))
    long = new_request(tokens)
    cache.attach(long)
    for end in (page, page + page // 2 + 1, 3 * page):
        compute(cache, long, end)
        cache.cache_unfinished(long)
        cache.check([long])
        assert cache.peek(long.tokens) == end - end % page
        assert long.cached_len == end  # what is computed of a page that is not full yet is not lost
    cache.cache_finished(long)
    assert_empty_after_flush(cache)


def test_output_is_kept_in_whole_pages(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(64, 16)
    request = new_request(list(range(10)))
    cache.attach(request)
    compute(cache, request)
    for token in range(10):  # the 20th token's KV is never computed
        request.append(100 + token)
        if token < 9:
            compute(cache, request)
    cache.cache_finished(request)
    assert cache.counts().cached == 16
    assert cache.peek(request.tokens) == 16
    assert_empty_after_flush(cache)


@PAGES
def test_retain_none_forgets(page: int, new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(page * 16, page, retain="none")
    shared = list(range(2 * page))
    first, second = new_request([*shared, *[1] * page, 5]), new_request([*shared, *[2] * page, 5])
    cache.attach(first)
    compute(cache, first)
    cache.cache_unfinished(first)
    cache.attach(second)
    assert second.cached_len == 2 * page  # the living still share
    compute(cache, second)
    cache.cache_unfinished(second)
    cache.check([first, second])
    cache.cache_finished(first)
    cache.check([second])
    assert cache.counts().cached == 0
    assert cache.peek(second.tokens) == 3 * page
    cache.cache_finished(second)
    cache.check([])
    assert cache.counts().free == cache.capacity
    assert cache.counts().evicted_total == 0


def test_retain_none_leaves_nothing_in_memory(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(64, retain="none")
    before = living_nodes()
    for start in range(100):
        request = new_request(list(range(start, start + 40)))
        cache.attach(request)
        compute(cache, request)
        cache.cache_unfinished(request)
        cache.cache_finished(request)
    assert living_nodes() <= before


def living_nodes() -> int:
    gc.collect()
    return sum(isinstance(thing, Node) for thing in gc.get_objects())


@pytest.mark.parametrize("retain", ["prefix", "none"])
def test_a_refused_candidate_leaves_no_trace(retain: str, new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(64, retain=retain)
    holder = new_request(list(range(20)))
    cache.attach(holder)
    compute(cache, holder)
    cache.cache_unfinished(holder)
    before = cache.counts()
    candidate = new_request([*range(10), 50, 51])
    cache.attach(candidate)
    assert candidate.cached_len == 10
    cache.cache_finished(candidate, keep=False)
    assert cache.counts() == before
    cache.check([holder])
    cache.cache_finished(holder)
    assert_empty_after_flush(cache)


def test_keep_false_forgets_what_was_not_shared_yet(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache()
    request = new_request(list(range(10)))
    cache.attach(request)
    compute(cache, request, 4)
    cache.cache_unfinished(request)
    compute(cache, request)
    cache.cache_finished(request, keep=False)
    assert cache.counts().cached == 4
    assert_empty_after_flush(cache)


def test_release_is_idempotent(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache()
    request = new_request([1, 2, 3])
    cache.cache_finished(request)  # never attached
    cache.attach(request)
    with pytest.raises(InvariantError):
        cache.attach(request)
    compute(cache, request)
    cache.cache_finished(request)
    cache.cache_finished(request)
    assert_empty_after_flush(cache)


@PAGES
def test_growth_evicts_the_oldest_and_never_the_held(page: int, new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(page * 8, page)
    held = new_request([*range(2 * page), 1])
    cache.attach(held)
    compute(cache, held)
    cache.cache_unfinished(held)  # two pages in the tree, one of its own
    for name in (100, 200):
        done = new_request([name] * (2 * page))
        cache.attach(done)
        compute(cache, done)
        cache.cache_finished(done)
    assert cache.counts().free == page
    assert cache.available == 5 * page
    new = new_request([300] * (3 * page))
    cache.attach(new)
    assert cache.room_needed(new, 3 * page) == 3 * page
    compute(cache, new)
    cache.check([held, new])
    assert cache.counts().evicted_total == 2 * page
    assert cache.peek(new_request([100] * (2 * page)).tokens) == 0
    assert cache.peek(new_request([200] * (2 * page + 1)).tokens) == 2 * page
    assert cache.peek(held.tokens) == 2 * page
    for request in (held, new):
        cache.cache_finished(request)
    assert_empty_after_flush(cache)


def test_room_is_counted_in_pages(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(64, 16)
    request = new_request(list(range(5)))
    cache.attach(request)
    assert cache.room_needed(request, 5) == 16
    cache.extend(request, 5)
    assert [cache.room_needed(request, n) for n in (5, 16, 17, 33)] == [0, 0, 16, 32]
    cache.cache_finished(request, keep=False)
    assert_empty_after_flush(cache)


def test_flush_spares_the_living(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache()
    done, live = new_request([1, 2, 3, 4]), new_request([1, 2, 9])
    for request in (done, live):
        cache.attach(request)
        compute(cache, request)
        cache.cache_unfinished(request)
    cache.cache_finished(done)
    assert cache.flush() == 2  # tokens 3 and 4
    cache.check([live])
    assert cache.peek(live.tokens) == 2
    cache.cache_finished(live)
    assert_empty_after_flush(cache)


def test_check_sees_a_slot_with_two_owners(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache()
    request = new_request([1, 2, 3])
    cache.attach(request)
    compute(cache, request)
    cache.check([request])
    cache.rows.table[request.row, 0] = cache.rows.table[request.row, 1]
    with pytest.raises(InvariantError):
        cache.check([request])


def test_check_sees_a_forgotten_request(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache()
    request = new_request([1, 2, 3])
    cache.attach(request)
    compute(cache, request)
    with pytest.raises(InvariantError):
        cache.check([])
