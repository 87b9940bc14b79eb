"""Who comes first, that nobody starves, and that the order follows the cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.property.walk import POLICIES
from tests.scheduler.rig import add, ids, new_walk, step, steps_until_done, tokens
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.kv.radix_tree import RadixTree
from weft.scheduler.limits import Limits, Policy
from weft.scheduler.waiting import AGEING, WaitingLine


def request(
    request_id: int, prompt: list[int], *, arrival_s: float = 0.0, priority: int = 0, limit: int = 100
) -> Request:
    return Request(
        request_id,
        np.array(prompt, dtype=np.int32),
        SamplingParams(),
        max_device_len=limit,
        seed=0,
        arrival_s=arrival_s,
        priority=priority,
    )


def insert(tree: RadixTree, prompt: list[int]) -> None:
    tree.insert(np.array(prompt, dtype=np.int32), np.arange(len(prompt), dtype=np.int32))


def order(policy: Policy, *, priority: bool = False) -> list[int]:
    """Ids of four requests; what tells them apart is spelled out below."""
    tree = RadixTree()
    insert(tree, [2] * 5)
    insert(tree, [4] * 2)
    line = WaitingLine(Limits(policy=policy, priority=priority), tree)
    line.add(request(1, [1] * 9, arrival_s=3.0, priority=1, limit=20))
    line.add(request(2, [2] * 9, arrival_s=2.0, priority=1, limit=30))
    line.add(request(3, [2] * 9, arrival_s=1.0, priority=0, limit=15))
    line.add(request(4, [4] * 9, arrival_s=1.0, priority=2, limit=40))
    return [r.request_id for r in line.ordered()]


def test_fcfs_by_arrival_then_id() -> None:
    assert order("fcfs") == [3, 4, 2, 1]


def test_lpm_by_cached_length_then_arrival() -> None:
    assert order("lpm") == [3, 2, 4, 1]


def test_lof_by_output_length() -> None:
    assert order("lof") == [4, 2, 1, 3]


def test_dfs_weight_goes_branch_by_branch_the_fullest_first() -> None:
    tree = RadixTree()
    for branch in ([5, 1], [5, 2], [6, 1]):
        insert(tree, branch)
    line = WaitingLine(Limits(policy="dfs-weight"), tree)
    prompts = {1: [9, 9, 9], 2: [6, 1, 9], 3: [5, 2, 9], 4: [5, 1, 9], 5: [5, 3, 9], 6: [5, 2, 8], 7: [6, 1, 9]}
    for request_id, prompt in prompts.items():
        line.add(request(request_id, prompt, arrival_s=float(request_id)))
    # Branch 5 has four waiting, two of them below 5-2; branch 6 has two; one is cached nowhere.
    assert [r.request_id for r in line.ordered()] == [3, 6, 4, 5, 2, 7, 1]


def test_random_is_an_order_that_the_seed_fixes() -> None:
    def shuffled(seed: int) -> list[int]:
        line = WaitingLine(Limits(policy="random"), RadixTree(), seed)
        for request_id in range(1, AGEING):
            line.add(request(request_id, [1, 2]))
        return [r.request_id for r in line.ordered()]

    assert shuffled(0) == shuffled(0) != shuffled(1)
    assert sorted(shuffled(0)) == list(range(1, AGEING)) != shuffled(0)


def test_priority_comes_before_the_policy() -> None:
    assert order("fcfs", priority=True) == [3, 2, 1, 4]
    assert order("lpm", priority=True) == [3, 2, 1, 4]
    assert order("lof", priority=True) == [3, 2, 1, 4]
    assert order("dfs-weight", priority=True) == [3, 2, 1, 4]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_order_follows_every_change_of_the_tree(page_size: int) -> None:
    """Cached lengths kept up to date must equal those looked up afresh, whatever happens to the tree."""
    rng = np.random.default_rng(page_size)
    tree = RadixTree(page_size)
    line = WaitingLine(Limits(policy="lpm"), tree)
    families = rng.integers(1, 4, size=(3, 40)).astype(np.int32)
    waiting: dict[int, Request] = {}
    for number in range(1500):
        family = families[int(rng.integers(3))]
        some = family[: int(rng.integers(1, 40))].copy()
        match int(rng.integers(5)):
            case 0:
                waiting[number] = request(number, some.tolist())
                line.add(waiting[number])
            case 1 if waiting:
                line.remove(waiting.pop(int(rng.choice(list(waiting)))))
            case 2:
                tree.evict(int(rng.integers(1, 12)))
            case 3:
                tree.match(some)  # may split
            case _:
                some[int(rng.integers(len(some))) :] = rng.integers(1, 4)
                length = len(some) - len(some) % page_size
                tree.insert(some[:length], np.arange(length, dtype=np.int32))
        cached = {k: tree.peek(r.tokens[: r.device_len - 1]) for k, r in waiting.items()}
        assert line.uncached_tokens == sum(r.device_len - 1 - cached[k] for k, r in waiting.items())
        if len(waiting) < AGEING:
            found = [r.request_id for r in line.ordered()]
            assert found == sorted(waiting, key=lambda k: (-cached[k], k))


def test_a_line_may_shrink_while_it_is_read() -> None:
    line = WaitingLine(Limits(policy="fcfs"), RadixTree())
    members = [request(k, [1, k]) for k in range(1, 30)]
    for member in members:
        line.add(member)
    seen = []
    for member in line.ordered():
        seen.append(member.request_id)
        line.take(member)
        if member.request_id == 3:
            line.remove(members[10])
    assert sorted(seen) == [k for k in range(1, 30) if k != 11]
    assert not len(line)


def test_lpm_runs_what_is_cached_first() -> None:
    walk = new_walk(policy="lpm", max_batch_size=1, max_concurrent_requests=4)
    add(walk, tokens(50, start=7), new=1)
    steps_until_done(walk)
    add(walk, tokens(20, start=1), new=1)
    add(walk, np.concatenate([tokens(50, start=7), tokens(5)]), new=1)
    assert [ids(plan) for plan in steps_until_done(walk)] == [[3], [2]]


def test_lpm_picks_from_the_queue_too() -> None:
    walk = new_walk(policy="lpm", max_batch_size=1, max_concurrent_requests=1)
    add(walk, tokens(50, start=7), new=1)
    add(walk, tokens(20, start=1), new=1)
    add(walk, np.concatenate([tokens(50, start=7), tokens(5)]), new=1)
    assert [ids(plan) for plan in steps_until_done(walk)] == [[1], [3], [2]]


def test_priority_is_ignored_unless_asked_for() -> None:
    for heeded, expected in ((False, [[1], [2]]), (True, [[2], [1]])):
        walk = new_walk(policy="fcfs", priority=heeded, max_batch_size=1)
        add(walk, tokens(5, start=1), new=1, priority=5)
        add(walk, tokens(5, start=2), new=1, priority=-5)
        assert [ids(plan) for plan in steps_until_done(walk)] == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_every_run_takes_the_same_order(policy: Policy) -> None:
    def trace() -> list[list[int]]:
        walk = new_walk(policy=policy, max_batch_size=3, max_prefill_tokens=40, chunked_prefill_size=16, capacity=400)
        for start in range(1, 20):
            add(walk, tokens(5 + 3 * start, start=1 + start % 4), new=3)
        return [ids(plan) for plan in steps_until_done(walk)]

    assert trace() == trace()


@pytest.mark.parametrize("reason", ["prefix", "priority"])
def test_nobody_starves(reason: str) -> None:
    """A stream of better requests that never ends: what waits is taken within the promised number of places."""
    walk = new_walk(policy="lpm", priority=reason == "priority", max_batch_size=1, max_concurrent_requests=1)

    def add_better() -> None:
        prompt = np.concatenate([tokens(50, start=7), tokens(5, start=8 + len(walk.requests) % 40)])
        add(walk, prompt if reason == "prefix" else tokens(5, start=9), new=1, priority=-1)

    for _ in range(3):
        add_better()
    worse = [add(walk, tokens(20, start=start), new=1) for start in (1, 2)]
    order: list[int] = []
    for _ in range(AGEING * 8):
        add_better()
        order += ids(step(walk))
    places = [order.index(r.request_id) for r in worse]
    assert places == sorted(places)
    assert places[0] > 3, "the others were better"
    assert places[-1] <= AGEING * 5 + 5
    walk.drain()
