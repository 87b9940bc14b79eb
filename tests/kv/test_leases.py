"""Sessions that keep their KV: for how long, how much, and who gives way."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kv.conftest import NewRequest
from weft.kv.prefix_cache import PrefixCache

Cache = PrefixCache


def new_cache(capacity: int = 100, page: int = 1) -> PrefixCache:
    return PrefixCache(capacity, page_size=page, max_rows=4, max_len=capacity, bytes_per_token=3)


def turn(cache: PrefixCache, new_request: NewRequest, session: str, tokens: list[int], now_s: float = 0.0) -> None:
    """One request of a session, from its arrival to its release."""
    request = new_request(tokens)
    cache.attach(request)
    cache.extend(request, request.device_len)
    request.planned_len = request.device_len
    request.advance(request.device_len - request.cached_len)
    cache.cache_finished(request)
    cache.lease(session, request.tokens, now_s, 10.0)
    cache.check([])


def test_a_lease_protects_from_eviction_and_its_end_does_not(new_request: NewRequest) -> None:
    cache = new_cache()
    turn(cache, new_request, "a", [1] * 20)
    assert (cache.counts().cached, cache.counts().leased, cache.available) == (20, 20, 80)
    assert cache.evict(100) == 0
    assert cache.end_lease("a") and not cache.end_lease("a")
    assert (cache.counts().leased, cache.available) == (0, 100)
    assert cache.evict(100) == 20
    cache.check([])


def test_the_next_turn_moves_the_lease(new_request: NewRequest) -> None:
    cache = new_cache()
    turn(cache, new_request, "a", [1] * 10)
    turn(cache, new_request, "a", [1] * 10 + [2] * 10, now_s=4.0)
    (session,) = cache.sessions(5.0)
    assert session == {
        "id": "a",
        "tokens": 20,
        "bytes": 60,
        "turns": 2,
        "expires_in_s": 9.0,
        "last_used_s_ago": 1.0,
    }
    turn(cache, new_request, "a", [3] * 5)  # a conversation that starts over lets the old one go
    assert cache.counts().leased == 5


def test_time_ends_a_lease_and_a_request_renews_it(new_request: NewRequest) -> None:
    cache = new_cache()
    turn(cache, new_request, "a", [1] * 10)
    turn(cache, new_request, "b", [2] * 10)
    cache.renew_lease("a", 5.0, 10.0)
    cache.renew_lease("nobody", 5.0, 10.0)
    assert cache.expire_leases(9.9) == 0
    assert cache.expire_leases(10.0) == 1
    assert [s["id"] for s in cache.sessions(10.0)] == ["a"]
    assert cache.expire_leases(15.0) == 1
    assert cache.counts().leased == 0 and cache.expire_leases(99.0) == 0
    cache.check([])


def test_sessions_hold_half_of_the_cache_at_most(new_request: NewRequest) -> None:
    cache = new_cache(100)
    for name in range(1, 8):
        turn(cache, new_request, str(name), [name] * 15)
    assert [s["id"] for s in cache.sessions(0.0)] == ["5", "6", "7"]  # the oldest gave way
    cache.renew_lease("5", 1.0, 10.0)
    turn(cache, new_request, "8", [8] * 15)
    assert [s["id"] for s in cache.sessions(1.0)] == ["7", "5", "8"]


def test_what_sessions_share_counts_once(new_request: NewRequest) -> None:
    cache = new_cache(100)
    for name in range(1, 7):
        turn(cache, new_request, str(name), [9] * 20 + [name] * 5)
    assert len(cache.sessions(0.0)) == 6  # 20 + 6 * 5
    assert cache.counts().leased == 50
    turn(cache, new_request, "7", [9] * 20 + [7] * 5)
    assert len(cache.sessions(0.0)) == 6
    cache.end_lease("3")
    cache.check([])


@pytest.mark.parametrize("page", [1, 16])
def test_a_conversation_longer_than_the_budget_keeps_its_beginning(new_request: NewRequest, page: int) -> None:
    cache = new_cache(160, page)
    turn(cache, new_request, "a", list(range(1, 145)))
    assert cache.sessions(0.0)[0]["tokens"] == 80
    assert cache.counts().leased == 80


def test_a_lease_survives_splits_and_shares_with_requests(new_request: NewRequest) -> None:
    cache = new_cache()
    turn(cache, new_request, "a", [1] * 20)
    request = new_request([1] * 8 + [2] * 5)
    cache.attach(request)  # splits the leased edge
    cache.check([request])
    assert (cache.counts().leased, cache.counts().active) == (12, 8)
    cache.end_lease("a")
    cache.check([request])
    assert cache.evict(100) == 12
    cache.cache_finished(request)
    cache.check([])


def test_the_least_recently_used_one_gives_way_when_asked(new_request: NewRequest) -> None:
    cache = new_cache()
    turn(cache, new_request, "a", [1] * 10)
    turn(cache, new_request, "b", [2] * 10)
    assert cache.yield_lease()
    assert [s["id"] for s in cache.sessions(0.0)] == ["b"]
    assert cache.yield_lease() and not cache.yield_lease()


def test_nothing_cached_means_no_lease(new_request: NewRequest) -> None:
    cache = new_cache()
    cache.lease("a", np.array([1, 2, 3], dtype=np.int32), 0.0, 10.0)
    assert cache.sessions(0.0) == []


def test_random_leases_keep_the_books_right(new_request: NewRequest) -> None:
    rng = np.random.default_rng(3)
    cache = new_cache(128, page=4)
    for number in range(500):
        match int(rng.integers(5)):
            case 0:
                cache.end_lease(str(rng.integers(6)))
            case 1:
                cache.evict(int(rng.integers(1, 40)))
            case 2:
                cache.expire_leases(float(number))
            case _:
                shared, own = int(rng.integers(1, 30)), int(rng.integers(1, 30))
                session = str(rng.integers(6))
                needed = -(-(shared + own) // 4) * 4
                if cache.available >= needed:
                    turn(cache, new_request, session, [1] * shared + [2 + number % 7] * own, float(number))
        cache.check([])
        assert sum(1 for _ in cache.sessions(0.0)) <= 6
