"""Planning a step while one runs: the same tokens, exactly as many, none after the end, and nothing freed too soon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.property.walk import VOCAB, Walk
from tests.scheduler.rig import add, ids, new_walk, shares, step, tokens
from weft.backends.fake.backend import kv_values, next_token
from weft.core.plan import IN_FLIGHT
from weft.core.request import FinishReason, RequestState


def mixture(walk: Walk) -> Walk:
    """All sorts of requests, run to their end."""
    end = next_token(kv_values(tokens(9, start=3), np.arange(9, dtype=np.int32)), VOCAB)
    add(walk, tokens(30, start=1), new=1)
    add(walk, tokens(30, start=2), new=7, temperature=1.0, seed=4)
    add(walk, tokens(9, start=3), new=20, stop_token_ids=(end,))
    add(walk, tokens(9, start=3), new=20, stop_token_ids=(end,), min_tokens=3)
    add(walk, tokens(90, start=4), new=5, prompt_logprobs=1, logprobs=1)
    add(walk, tokens(1, start=5), new=12)
    walk.drain()
    return walk


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"chunked_prefill_size": 7, "max_prefill_tokens": 16},
        {"chunked_prefill_size": None},
        {"mixed": False, "chunked_prefill_size": 16},
        {"max_batch_size": 2, "max_concurrent_requests": 3},
        {"page_size": 4},
        {"capacity": 128},
    ],
)
def test_both_loops_give_the_same(limits: dict[str, Any]) -> None:
    plain, overlapped = mixture(new_walk(depth=1, **limits)), mixture(new_walk(depth=2, **limits))
    assert plain.tokens == overlapped.tokens
    endings = [{k: r.ending for k, r in walk.requests.items()} for walk in (plain, overlapped)]
    assert endings[0] == endings[1]


def test_a_token_in_flight_is_a_placeholder() -> None:
    walk = new_walk(depth=2)
    add(walk, tokens(5), new=3)
    first, second = walk.begin_step(), walk.begin_step()
    assert first is not None and second is not None
    assert second.token_ids.tolist() == [IN_FLIGHT]
    assert (second.positions.tolist(), second.sampling[0].output_index) == ([5], 1)
    walk.end_step()
    third = walk.begin_step()
    assert third is not None and third.sampling[0].output_index == 2
    walk.drain()


@pytest.mark.parametrize("new", [1, 2, 3, 10])
def test_exactly_max_new_tokens_and_no_step_for_more(new: int) -> None:
    walk = new_walk(depth=2)
    request = add(walk, tokens(5), new=new)
    walk.drain()
    assert request.output_len == new
    assert walk.scheduler.steps == new


def test_nothing_after_an_end_token() -> None:
    prompt = tokens(5)
    end = next_token(kv_values(prompt, np.arange(5, dtype=np.int32)), VOCAB)
    walk = new_walk(depth=2)
    request = add(walk, prompt, new=9, stop_token_ids=(end,))
    walk.begin_step()
    follower = walk.begin_step()
    assert follower is not None
    walk.end_step()
    assert walk.ended == {1: RequestState.COMPLETED}
    assert request.row >= 0, "the step in flight still writes to its slots"
    assert walk.scheduler.leaving and not walk.scheduler.running
    assert walk.scheduler.abandoned(follower)
    walk.end_step()
    assert walk.tokens[1][5:] == [end]
    assert request.row < 0
    assert walk.cache.peek(np.append(request.tokens, 1)) == 6  # and the KV of the end token was good
    walk.drain()


def test_a_leaving_request_keeps_its_place_in_the_batch() -> None:
    walk = new_walk(depth=2, max_batch_size=1)
    add(walk, tokens(5, start=1), new=9)
    add(walk, tokens(5, start=2), new=1)
    walk.begin_step()
    walk.begin_step()
    walk.scheduler.abort(1)
    walk.settle()
    assert walk.begin_step() is None
    walk.end_step()
    assert walk.begin_step() is None
    walk.end_step()
    plan = walk.begin_step()
    assert plan is not None and ids(plan) == [2]
    walk.end_step()
    walk.drain()


def test_chunks_follow_each_other_without_waiting() -> None:
    walk = new_walk(depth=2, chunked_prefill_size=16, max_prefill_tokens=16)
    add(walk, tokens(40), new=2)
    plans = [walk.begin_step(), walk.begin_step()]
    assert [shares(plan) for plan in plans if plan] == [{1: 16}, {1: 16}]
    walk.drain()


def test_a_prefix_in_flight_is_not_computed_twice() -> None:
    walk = new_walk(depth=2)
    prompt = tokens(60)
    add(walk, prompt, new=2)
    first = walk.begin_step()
    add(walk, np.append(prompt, 3), new=2)
    second = walk.begin_step()
    assert first is not None and second is not None
    assert ids(second) == [1]
    walk.end_step()
    third = walk.begin_step()
    assert third is not None and shares(third)[2] == 1
    walk.drain()


def test_a_failed_step_takes_the_one_planned_on_it_along() -> None:
    walk = new_walk(depth=2, chunked_prefill_size=16, max_prefill_tokens=16)
    request = add(walk, tokens(40), new=2)
    walk.begin_step()
    walk.begin_step()
    walk.end_step(broken=True)
    assert walk.ended == {1: RequestState.FAILED}
    walk.end_step()
    assert walk.cache.counts().cached == 0, "nothing of what was computed on top of the failed step is kept"
    assert request.row < 0
    walk.drain()


@pytest.mark.parametrize("how", ["abort", "complete", "expire"])
def test_an_ending_with_two_steps_in_flight(how: str) -> None:
    walk = new_walk(depth=2)
    request = add(walk, tokens(5), new=20, timeout_s=3.0)
    walk.begin_step()
    walk.end_step()
    walk.begin_step()
    walk.begin_step()
    if how == "expire":
        walk.clock.advance(3.0)
        walk.scheduler.expire()
    else:
        getattr(walk.scheduler, how)(1)
    walk.settle()
    assert len(walk.ended) == 1 and request.in_flight == 2
    walk.end_step()
    assert request.row >= 0
    walk.end_step()
    assert request.row < 0 and request.output_len == 1
    assert request.ending is not None
    assert (request.ending.finish_reason is FinishReason.STOP) == (how == "complete")
    walk.drain()


def test_steps_land_in_order() -> None:
    walk = new_walk(depth=2)
    add(walk, tokens(5), new=3)
    walk.begin_step()
    second = walk.begin_step()
    assert second is not None
    with pytest.raises(RuntimeError, match="before step"):
        walk.scheduler.fail(second, "out of order")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_sequences", [None, 8])
def test_a_step_that_is_mostly_unwanted_is_broken_off_and_done_again(depth: int, num_sequences: int | None) -> None:
    walk = new_walk(depth=depth, num_sequences=num_sequences, chunked_prefill_size=200, max_prefill_tokens=300)
    decoding = add(walk, tokens(8, start=1), new=12)
    step(walk)
    unwanted = add(walk, tokens(180, start=2), new=1)
    neighbour = add(walk, tokens(20, start=3), new=3)
    plan = walk.begin_step()
    assert plan is not None and plan.num_rows == 3
    if depth == 2:
        walk.begin_step()
    assert not walk.scheduler.abandoned(plan)
    walk.scheduler.abort(unwanted.request_id)
    assert walk.scheduler.abandoned(plan)
    walk.end_step(plan, cancel=True)
    assert neighbour.state is not RequestState.FAILED and decoding.state is RequestState.PROCESSING
    walk.drain()  # compares every token with the model's alone
    assert decoding.output_len == 12 and neighbour.output_len == 3


def test_a_step_that_others_want_is_not_broken_off_for_a_few_tokens() -> None:
    walk = new_walk()
    gone, stays = add(walk, tokens(20, start=1)), add(walk, tokens(4, start=2))
    plan = walk.begin_step()
    assert plan is not None
    walk.scheduler.abort(gone.request_id)
    assert not walk.scheduler.abandoned(plan)
    walk.end_step()
    walk.drain()
    assert stays.state is RequestState.COMPLETED
