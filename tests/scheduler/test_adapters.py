"""Requests with LoRA adapters: steps of one adapter, in turns, and nothing shared between them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.rig import add, ids, new_walk, step, steps_until_done, tokens
from weft.core.errors import InvariantError
from weft.core.plan import StepPlan
from weft.core.request import RequestState


def adapters(plans: list[StepPlan]) -> list[int]:
    return [plan.adapter for plan in plans]


def test_decoding_streams_of_three_adapters_take_turns() -> None:
    walk = new_walk(adapters=2)
    requests = [add(walk, tokens(9, start=1 + k), adapter=k % 3, new=6) for k in range(6)]
    plans = steps_until_done(walk)
    assert adapters(plans) == [0, 1, 2] * 6
    assert all(plan.num_rows == 2 for plan in plans)
    assert all(request.output_len == 6 for request in requests)
    walk.drain()


def test_overlapped_steps_take_turns_too() -> None:
    walk = new_walk(adapters=1, depth=2)
    for k in range(4):
        add(walk, tokens(9, start=1 + k), adapter=k % 2, new=5)
    planned = []
    while walk.scheduler.has_work:
        while len(walk.flights) < 2 and (plan := walk.begin_step()) is not None:
            planned.append(plan.adapter)
        walk.end_step()
    assert planned == [0, 1] * 5
    walk.drain()


def test_one_adapter_alone_takes_every_step_and_the_plans_are_those_without_adapters() -> None:
    plans = []
    for count, adapter in ((0, 0), (3, 0), (3, 2)):
        walk = new_walk(adapters=count, chunked_prefill_size=16)
        for k in range(3):
            add(walk, tokens(40, start=1 + k % 2), adapter=adapter, new=5)
        made = steps_until_done(walk)
        assert set(adapters(made)) == {adapter}
        plans.append([(ids(p), p.mode, p.extend_lens.tolist(), p.slots.tolist(), p.emits.tolist()) for p in made])
        walk.drain()
    assert plans[0] == plans[1] == plans[2]


def test_kv_is_shared_within_an_adapter_and_never_between() -> None:
    walk = new_walk(adapters=2)
    prompt = tokens(50)
    for adapter in (0, 1, 2):
        first = add(walk, prompt, adapter=adapter)
        steps_until_done(walk)
        assert first.reused_tokens == 0 and first.miss is not None and first.miss.reason == "never_seen"
    outputs = set()
    for adapter in (0, 1, 2):
        again = add(walk, prompt, adapter=adapter)
        steps_until_done(walk)
        assert again.reused_tokens == 49
        outputs.add(tuple(again.output_ids.tolist()))
    assert len(outputs) == 3
    walk.drain()


def test_equal_prompts_of_two_adapters_do_not_wait_for_each_other() -> None:
    walk = new_walk(adapters=1, depth=2)
    add(walk, tokens(50))
    add(walk, tokens(50), adapter=1)
    first, second = walk.begin_step(), walk.begin_step()
    assert first is not None and second is not None
    assert (first.adapter, second.adapter) == (0, 1) and second.num_tokens == 50
    walk.drain()


def test_a_miss_tells_what_was_evicted_of_the_same_adapter() -> None:
    walk = new_walk(adapters=1)
    add(walk, tokens(20), adapter=1)
    steps_until_done(walk)
    walk.cache.flush()
    reasons = []
    for adapter in (1, 0):
        request = add(walk, tokens(20), adapter=adapter)
        steps_until_done(walk)
        assert request.miss is not None
        reasons.append(request.miss.reason)
    assert reasons == ["evicted", "never_seen"]
    walk.drain()


def test_a_session_keeps_the_kv_of_the_adapter_that_it_used() -> None:
    walk = new_walk(adapters=1)
    add(walk, tokens(20), adapter=1, session="a")
    steps_until_done(walk)
    walk.cache.flush()
    assert walk.cache.sessions(0.0)[0]["tokens"] == 23
    other, same = add(walk, tokens(20), session="b"), add(walk, tokens(20), adapter=1)
    steps_until_done(walk)
    assert (other.reused_tokens, same.reused_tokens) == (0, 19)
    walk.drain()


def test_a_long_prompt_is_cut_while_others_decode() -> None:
    """Chunks of one adapter's prompt and tokens of another's stream alternate; only one prompt is cut at a time."""
    walk = new_walk(adapters=2, chunked_prefill_size=16, max_prefill_tokens=16)
    stream = add(walk, tokens(5, start=1), new=12)
    step(walk)
    long = add(walk, tokens(64, start=2), adapter=1, new=1)
    also_long = add(walk, tokens(64, start=3), adapter=2, new=1)
    plans = steps_until_done(walk)
    assert adapters(plans[:8]) == [1, 0, 1, 0, 1, 0, 1, 2]
    assert long.state is also_long.state is RequestState.COMPLETED and stream.output_len == 12
    assert sum(2 in plan.request_ids for plan in plans) == sum(3 in plan.request_ids for plan in plans) == 4
    walk.drain()


def test_steps_without_mixing_alternate_within_each_adapter() -> None:
    """Prompts of one adapter do not keep its own streams from their tokens, whatever the others do in between."""
    walk = new_walk(adapters=1, mixed=False, max_prefill_tokens=8, chunked_prefill_size=8)
    for adapter in (0, 1):
        add(walk, tokens(8, start=1 + adapter), adapter=adapter, new=8)
    step(walk), step(walk)
    for k in range(12):
        add(walk, tokens(8, start=3 + k), adapter=k % 2, new=1)
    modes: dict[int, list[str]] = {0: [], 1: []}
    for plan in steps_until_done(walk)[:16]:
        modes[plan.adapter].append(plan.mode)
    assert modes[0] == modes[1] == ["decode", "extend"] * 4
    walk.drain()


def test_a_flood_on_one_adapter_does_not_starve_another() -> None:
    """Every place is taken, and two hundred more wait: the next place that is free goes to the other adapter."""
    walk = new_walk(adapters=1, max_batch_size=4, max_concurrent_requests=300)
    for k in range(200):
        add(walk, tokens(6, start=1 + k % 40), new=3)
    step(walk)
    other = add(walk, tokens(6, start=45), adapter=1, new=3)
    steps = 0
    while other.state is not RequestState.COMPLETED:
        step(walk)
        steps += 1
    assert steps <= 8
    walk.drain()


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_flood_of_small_requests_does_not_keep_a_large_one_of_another_adapter_from_its_room(policy: str) -> None:
    walk = new_walk(
        adapters=1, capacity=256, max_context=256, max_queue_size=4, max_batch_size=8, ratio=1.0, policy=policy
    )
    number = 0

    def flood() -> None:
        nonlocal number
        while len(walk.scheduler.pending) < 16:
            number += 1
            add(walk, tokens(4, start=1 + number % 40), new=20 + number % 13)  # so that they end at different times

    flood()
    step(walk)
    large = add(walk, tokens(200, start=45), adapter=1, new=30)
    for _ in range(600):
        flood()
        step(walk)
        if large.state is RequestState.COMPLETED:
            break
    assert large.state is RequestState.COMPLETED
    walk.drain()


def test_retracted_requests_of_two_adapters_come_back() -> None:
    walk = new_walk(adapters=1, capacity=128, ratio=0.0, max_batch_size=6)
    requests = [add(walk, tokens(12, start=1 + k), adapter=k % 2, new=60) for k in range(6)]
    steps_until_done(walk)
    assert sum(request.retractions for request in requests) > 0
    assert all(request.output_len == 60 for request in requests)
    walk.drain()


def test_an_adapter_that_does_not_exist_is_a_mistake_of_ours() -> None:
    walk = new_walk(adapters=1)
    with pytest.raises(InvariantError, match="adapter 2 of 1"):
        add(walk, np.array([1, 2]), adapter=2)


def test_nobody_fails_for_the_sake_of_one_whose_time_ran_out() -> None:
    """The first in line has another adapter, and turns out to be overdue only when that one's turn is tried."""
    walk = new_walk(capacity=64, max_context=64, adapters=2, policy="fcfs", ratio=1.0)
    late = add(walk, tokens(40), adapter=2, new=20, timeout_s=1.0)
    others = [add(walk, tokens(40, start=2 + k), adapter=k, new=20) for k in (0, 1)]
    walk.clock.advance(2.0)
    walk.drain()
    assert late.state is RequestState.TIMEOUT
    assert all(request.state is RequestState.COMPLETED for request in others)
