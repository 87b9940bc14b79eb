"""What is forgotten first, how much of it, when, and what is never forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kv.conftest import NewRequest
from weft.core.request import Request
from weft.kv.prefix_cache import PrefixCache
from weft.kv.radix_tree import MIN_CUT_TOKENS, EvictionPolicy, RadixTree

SIZE = 10


def prompt(name: int, length: int = SIZE) -> np.ndarray:
    return np.full(length, name, dtype=np.int32)


def insert(tree: RadixTree, name: int, length: int = SIZE) -> None:
    tree.insert(prompt(name, length), np.arange(length, dtype=np.int32) + 1000 * name)


def use(tree: RadixTree, name: int) -> None:
    node = tree.match(prompt(name)).node
    tree.lock(node)
    tree.unlock(node)


def eviction_order(tree: RadixTree, count: int) -> list[int]:
    return [int(tree.evict(1).slots[0]) // 1000 for _ in range(count)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [3, 2, 4, 1]), ("lfu", [3, 2, 4, 1]), ("fifo", [1, 2, 3, 4])],
)
def test_policies(policy: EvictionPolicy, expected: list[int]) -> None:
    tree = RadixTree(policy=policy)
    for name in (1, 2, 3, 4):
        insert(tree, name)
    for name in (2, 4, 4, 1, 1, 1):
        use(tree, name)
    assert eviction_order(tree, 4) == expected


def test_lfu_and_lru_part_ways() -> None:
    orders = {}
    for policy in ("lru", "lfu"):
        tree = RadixTree(policy=policy)
        insert(tree, 1)
        insert(tree, 2)
        for name in (1, 1, 1, 2):  # the first is used more often, the second more lately
            use(tree, name)
        orders[policy] = eviction_order(tree, 2)
    assert orders == {"lru": [1, 2], "lfu": [2, 1]}


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_against_a_model(policy: EvictionPolicy) -> None:
    """Flat prompts in random order of birth and use; the model sorts a list."""
    rng = np.random.default_rng(0)
    tree = RadixTree(policy=policy)
    facts: dict[int, list[int]] = {}  # name -> [born, uses, last used]
    for time in range(1, 601):
        name = int(rng.integers(1, 40))
        if name not in facts:
            insert(tree, name)
            facts[name] = [time, 0, time]
        elif rng.random() < 0.7:
            use(tree, name)
            facts[name][1] += 1
            facts[name][2] = time
        else:
            ranks = {"lru": lambda f: f[2], "lfu": lambda f: (f[1], f[2]), "fifo": lambda f: f[0]}
            expected = min(facts, key=lambda n: ranks[policy](facts[n]))
            assert eviction_order(tree, 1) == [expected]
            del facts[expected]
    tree.check()


@pytest.mark.parametrize("page", [1, 16])
def test_a_long_leaf_is_cut_at_its_end(page: int) -> None:
    tree = RadixTree(page)
    length = 100 * 16
    tree.insert(np.arange(length, dtype=np.int32), np.arange(length, dtype=np.int32))
    evicted = tree.evict(3)
    assert len(evicted.slots) == MIN_CUT_TOKENS
    assert evicted.slots.tolist() == list(range(length - MIN_CUT_TOKENS, length))
    assert tree.peek(np.arange(length, dtype=np.int32)) == length - MIN_CUT_TOKENS == tree.evictable_tokens
    tree.check()
    tree.evict(10**6)
    assert tree.evictable_tokens == 0
    tree.check()


def test_a_cut_leaf_does_not_keep_the_arrays_of_the_whole() -> None:
    tree = RadixTree()
    insert(tree, 1, 10_000)
    tree.evict(9_000)
    (node,) = tree.nodes()
    assert node.key.base is None and node.slots.base is None and len(node) == 1000


def cache_of(capacity: int, **more: object) -> PrefixCache:
    return PrefixCache(capacity, max_rows=4, max_len=capacity, **more)  # type: ignore[arg-type]


def run(cache: PrefixCache, request: Request) -> None:
    """A request comes, is computed, and ends."""
    cache.attach(request)
    cache.extend(request, request.device_len)
    request.planned_len = request.device_len
    request.advance(request.device_len - request.cached_len)
    cache.cache_finished(request)
    cache.check([])


def test_growth_beyond_the_threshold_forgets_the_oldest(new_request: NewRequest) -> None:
    cache = cache_of(100, eviction_threshold=0.8)
    for name in range(1, 9):
        run(cache, new_request(prompt(name)))
    assert cache.counts().cached == 80 and cache.evicted_total == 0
    run(cache, new_request(prompt(9)))
    assert cache.counts().cached == 80
    assert cache.peek(prompt(1, SIZE + 1)) == 0 and cache.peek(prompt(2, SIZE + 1)) == SIZE


def test_requests_may_fill_the_cache_beyond_the_threshold(new_request: NewRequest) -> None:
    cache = cache_of(100, eviction_threshold=0.5)
    running = new_request(prompt(1, 90))
    cache.attach(running)
    cache.extend(running, 90)
    assert cache.counts().active == 90
    running.planned_len = 90
    running.advance(90)
    cache.cache_finished(running)
    assert cache.counts().cached == 90  # nobody holds it now ...
    assert cache.trim() >= 40  # ... so the next look at the threshold takes it
    assert cache.counts().cached <= 50
    cache.check([])


def test_trim_spares_requests_and_sessions(new_request: NewRequest) -> None:
    cache = cache_of(100, eviction_threshold=0.1)
    run(cache, leased := new_request(prompt(1, 40)))
    cache.lease("a", leased.tokens, 0.0, 60.0)
    running = new_request(prompt(2, 50))
    cache.attach(running)
    cache.extend(running, 50)
    assert cache.trim() == 0
    assert (cache.counts().leased, cache.counts().active) == (40, 50)
    assert cache.flush() == 0
    cache.check([running])


def test_extend_by_one_is_extend_for_many(new_request: NewRequest) -> None:
    for page in (1, 4):
        one, many = (PrefixCache(64, page_size=page, max_rows=4, max_len=64) for _ in range(2))
        for cache in (one, many):
            requests = [new_request(prompt(name, 3 + name), limit=20) for name in (1, 2, 3)]
            for request in requests:
                cache.attach(request)
                cache.extend(request, request.device_len)
                request.planned_len = request.device_len
            for _ in range(6):
                if cache is many:
                    cache.extend_by_one(requests)
                else:
                    for request in requests:
                        cache.extend(request, request.planned_len + 1)
                for request in requests:
                    request.planned_len += 1
            cache.check(requests)
            assert [r.allocated_len for r in requests] == [-(-r.planned_len // page) * page for r in requests]
        assert one.pages.free_slots == many.pages.free_slots


def test_a_long_prompt_in_small_chunks_is_not_walked_from_the_root(new_request: NewRequest) -> None:
    """The work of each chunk is its own: the tree is looked at below what the request holds."""
    cache = cache_of(4096)
    request = new_request(np.arange(2000, dtype=np.int32) % 1000, limit=3000)
    cache.attach(request)
    starts: list[int] = []
    original = cache.tree.match

    def watching(tokens, *, below=None):  # type: ignore[no-untyped-def]
        starts.append(0 if below is None else below.end)
        return original(tokens, below=below)

    cache.tree.match = watching  # type: ignore[method-assign]
    for end in range(100, 2001, 100):
        cache.extend(request, end)
        request.planned_len = end
        request.advance(100)
        cache.cache_unfinished(request)
    assert starts == list(range(0, 2000, 100))
    cache.check([request])
    cache.cache_finished(request)
    assert cache.peek(request.tokens) == 1999


def test_reset_starts_afresh_whatever_was_wrong(new_request: NewRequest) -> None:
    cache = cache_of(100)
    run(cache, new_request(prompt(1)))
    cache.lease("a", prompt(1), 0.0, 60.0)
    cache.pages.allocate(5)  # a leak
    with pytest.raises(RuntimeError):
        cache.check([])
    cache.reset()
    cache.check([])
    counts = cache.counts()
    assert (counts.free, counts.cached, counts.leased) == (100, 0, 0)
    run(cache, new_request(prompt(1)))
    assert cache.peek(prompt(1, SIZE + 1)) == SIZE
