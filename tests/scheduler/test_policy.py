"""Who comes first."""

from __future__ import annotations

import numpy as np

from tests.scheduler.rig import add, ids, new_walk, step, steps_until_done, tokens
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.scheduler.limits import Limits, Policy
from weft.scheduler.policy import MAX_OVERTAKEN, ordered


def order(policy: Policy, *, priority: bool = False) -> list[int]:
    """Ids of four requests: (arrival, cached tokens, priority) are spelled out below."""
    facts = {1: (3.0, 0, 1), 2: (2.0, 50, 1), 3: (1.0, 50, 0), 4: (1.0, 10, 2)}
    cached = {request_id: length for request_id, (_, length, _) in facts.items()}
    requests = [
        Request(
            request_id,
            np.array([request_id], dtype=np.int32),
            SamplingParams(),
            max_device_len=5,
            seed=0,
            arrival_s=arrival,
            priority=rank,
        )
        for request_id, (arrival, _, rank) in facts.items()
    ]
    limits = Limits(policy=policy, priority=priority)
    return [r.request_id for r in ordered(requests, limits, lambda known: cached[int(known[0])])]


def test_fcfs_by_arrival_then_id() -> None:
    assert order("fcfs") == [3, 4, 2, 1]


def test_lpm_by_cached_length_then_arrival() -> None:
    assert order("lpm") == [3, 2, 4, 1]


def test_priority_comes_before_either() -> None:
    assert order("fcfs", priority=True) == [3, 2, 1, 4]
    assert order("lpm", priority=True) == [3, 2, 1, 4]


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


def test_every_run_takes_the_same_order() -> None:
    def trace() -> list[list[int]]:
        walk = new_walk(max_batch_size=3, max_prefill_tokens=40, chunked_prefill_size=16, capacity=400)
        for start in range(1, 20):
            add(walk, tokens(5 + 3 * start, start=1 + start % 4), new=3)
        return [ids(plan) for plan in steps_until_done(walk)]

    assert trace() == trace()


def test_lpm_starves_nobody() -> None:
    walk = new_walk(policy="lpm", max_batch_size=1, max_concurrent_requests=1)

    def add_hot() -> None:
        add(walk, np.concatenate([tokens(50, start=7), tokens(5, start=8 + len(walk.requests) % 40)]), new=1)

    for _ in range(3):
        add_hot()
    cold = [add(walk, tokens(20, start=start), new=1) for start in (1, 2)]
    order: list[int] = []
    for _ in range(MAX_OVERTAKEN + 10):
        add_hot()
        order += ids(step(walk))
    places = [order.index(request.request_id) for request in cold]
    assert places == sorted(places)
    assert MAX_OVERTAKEN <= places[0] <= places[1] < MAX_OVERTAKEN + 10
    walk.drain()
