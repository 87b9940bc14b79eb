"""When decoding runs out of room: who gives way, what becomes of it, and that nobody can tell from the output."""

from __future__ import annotations

import numpy as np
import pytest

from tests.property.walk import Walk
from tests.scheduler.rig import add, ids, new_walk, step, steps_until_done, tokens
from weft.core.request import FinishReason, RequestState
from weft.scheduler.reserve import DECAY_STEPS, FLOOR, MIN_GROWTH, START


def crowded(*, depth: int = 1, page_size: int = 1, new: int = 120, count: int = 12, **limits: object) -> Walk:
    """Requests that want several times what the cache holds, admitted as if they would produce next to nothing."""
    walk = new_walk(capacity=256, page_size=page_size, depth=depth, ratio=0.0, **limits)
    for start in range(1, count + 1):
        add(walk, tokens(10, start=start), new=new)
    return walk


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_output_is_that_of_an_undisturbed_run(depth: int, page_size: int) -> None:
    walk = crowded(depth=depth, page_size=page_size)
    walk.drain()
    assert walk.scheduler.meters.retractions > 3
    roomy = new_walk(capacity=8192, page_size=page_size)
    for start in range(1, 13):
        add(roomy, tokens(10, start=start), new=120)
    roomy.drain()
    assert roomy.scheduler.meters.retractions == 0
    assert walk.tokens == roomy.tokens
    assert {r.ending.finish_reason for r in walk.requests.values() if r.ending} == {FinishReason.LENGTH}


def test_sampling_goes_on_where_it_was() -> None:
    texts = []
    for capacity in (256, 8192):
        walk = new_walk(capacity=capacity, ratio=0.0)
        for start in range(1, 13):
            add(walk, tokens(10, start=start), new=120, temperature=1.0, seed=5, logprobs=1)
        walk.drain()
        texts.append(walk.tokens)
    assert texts[0] == texts[1]


def test_prompt_logprobs_are_told_once() -> None:
    walk = new_walk(capacity=256, ratio=0.0, chunked_prefill_size=16)
    for start in range(1, 9):
        add(walk, tokens(40, start=start), new=100, prompt_logprobs=0)
    told: dict[int, int] = {}
    original = walk.scheduler.take_updates

    def counting() -> list:  # type: ignore[type-arg]
        updates = original()
        for update in updates:
            told[update.request.request_id] = told.get(update.request.request_id, 0) + len(update.prompt_logprobs or [])
        return updates

    walk.scheduler.take_updates = counting  # type: ignore[method-assign]
    walk.drain()
    assert walk.scheduler.meters.retractions > 0
    assert told == dict.fromkeys(range(1, 9), 39)


def test_the_last_to_come_gives_way_and_comes_back_first() -> None:
    walk = crowded(policy="fcfs", count=8)
    while not walk.scheduler.retracted:
        step(walk)
    victim = max(r.request_id for r in walk.requests.values() if r.retractions or r.state is RequestState.PROCESSING)
    assert list(walk.scheduler.retracted) == [victim]
    assert walk.requests[victim].output_len > 0
    newcomer = add(walk, tokens(3, start=40), new=1)
    entered: list[int] = []
    while newcomer.state is RequestState.PENDING:
        before = {r.request_id for r in walk.scheduler.running.values()}
        entered += [i for i in ids(step(walk)) if i not in before]
    assert entered.index(victim) < entered.index(newcomer.request_id)
    walk.drain()


def test_a_low_priority_gives_way_before_a_late_one() -> None:
    walk = new_walk(capacity=256, ratio=0.0, priority=True, policy="fcfs")
    urgent = add(walk, tokens(10, start=1), new=200, priority=5)
    others = [add(walk, tokens(10, start=start), new=200, priority=1) for start in (2, 3, 4)]
    while not walk.scheduler.retracted:
        step(walk)
    assert urgent.retractions == 1 and not any(r.retractions for r in others)
    walk.drain()


def test_the_first_to_come_is_never_held_up() -> None:
    walk = crowded(policy="fcfs")
    first = walk.requests[1]
    while first.state is not RequestState.COMPLETED:
        assert 1 in ids(step(walk))
    assert first.retractions == 0
    walk.drain()


def test_steps_lie_between_two_retractions_of_one_request() -> None:
    walk = crowded(new=200)
    produced: dict[int, int] = {}
    original = walk.scheduler._retract

    def watching(request) -> None:  # type: ignore[no-untyped-def]
        if request.request_id in produced:
            assert request.output_len - produced[request.request_id] >= MIN_GROWTH // 2, "it thrashes"
        produced[request.request_id] = request.output_len
        original(request)

    walk.scheduler._retract = watching  # type: ignore[method-assign]
    walk.drain()
    assert produced


def test_the_ratio_sinks_while_all_goes_well_and_jumps_after_a_retraction() -> None:
    walk = new_walk()
    assert walk.scheduler._ratio.value == START
    add(walk, tokens(5), new=900)
    steps_until_done(walk)
    assert walk.scheduler._ratio.value == pytest.approx(FLOOR)
    assert DECAY_STEPS < 900
    crowd = crowded()
    while not crowd.scheduler.retracted:
        low = crowd.scheduler._ratio.value
        step(crowd)
    assert crowd.scheduler._ratio.value > low + 0.1


def test_admission_reserves_a_share_and_not_all() -> None:
    """Ten requests that may each fill a third of the cache: more than three run at once, without a retraction."""
    walk = new_walk(capacity=900, policy="fcfs")
    for start in range(1, 11):
        add(walk, tokens(10, start=start), new=290, stop_token_ids=tuple(range(10)))  # ends soon, as most do
    assert len(ids(step(walk))) > 3
    walk.drain()
    assert walk.scheduler.meters.retractions == 0


def test_a_client_without_a_limit_does_not_take_the_whole_cache() -> None:
    walk = new_walk(capacity=16384, max_context=16384)
    for start in (1, 2):
        add(walk, tokens(10, start=start), new=None)
    assert sorted(ids(step(walk))) == [1, 2]


def test_a_lone_request_that_outgrows_the_cache_ends_with_length() -> None:
    walk = new_walk(capacity=64, max_context=1000, ratio=0.0)
    add(walk, tokens(10, start=1), new=None)
    add(walk, tokens(10, start=2), new=None)
    walk.drain()
    assert [r.device_len for r in walk.requests.values()] == [64, 64]
    assert all(r.ending and r.ending.finish_reason is FinishReason.LENGTH for r in walk.requests.values())


def test_a_prompt_in_chunks_may_give_way_too() -> None:
    walk = new_walk(capacity=256, ratio=0.0, chunked_prefill_size=8, policy="fcfs")
    for start in range(1, 4):
        add(walk, tokens(8, start=start), new=70)
    for _ in range(30):
        step(walk)
    long = add(walk, tokens(120, start=9), new=5)
    walk.drain()
    assert long.state is RequestState.COMPLETED
    assert np.array_equal(long.prompt_ids, tokens(120, start=9))


@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_a_retracted_request_ends_like_any_other(end: str) -> None:
    walk = crowded()
    while not walk.scheduler.retracted:
        step(walk)
    request = next(iter(walk.scheduler.retracted.values()))
    if end == "abort":
        assert walk.scheduler.abort(request.request_id)
    else:
        request.deadline_s = walk.clock.now_s()
        walk.scheduler.expire()
    walk.settle()
    assert request.state is (RequestState.CANCELLED if end == "abort" else RequestState.TIMEOUT)
    walk.drain()
