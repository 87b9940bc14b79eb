"""Every accepted request ends exactly once: by itself, by a stop, a deadline, an abort or a failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.property.walk import VOCAB, Walk
from tests.scheduler.rig import add, ids, new_walk, step, steps_until_done, tokens
from weft.backends.fake.backend import kv_values, next_token
from weft.core.errors import DeadlineError
from weft.core.request import FinishReason, Request, RequestState
from weft.core.sampling import SamplingParams


def in_state(walk: Walk, state: RequestState) -> Request:
    """A request that stands in `state`, in a walk with one place in the running set and one in a batch."""
    if state is not RequestState.PROCESSING:
        add(walk, tokens(5, start=2), new=50)  # takes the place
        step(walk)
    request = add(walk, tokens(5, start=1), new=50)
    if state is RequestState.PROCESSING:
        step(walk)
    assert request.state is state
    return request


def small_walk(state: RequestState, **limits: Any) -> Walk:
    return new_walk(max_batch_size=1, max_concurrent_requests=1 if state is RequestState.QUEUED else 2, **limits)


STATES = pytest.mark.parametrize("state", [RequestState.QUEUED, RequestState.PENDING, RequestState.PROCESSING])


@STATES
def test_abort_at_any_stage(state: RequestState) -> None:
    walk = small_walk(state)
    request = in_state(walk, state)
    assert walk.scheduler.abort(request.request_id)
    walk.settle()
    assert request.state is RequestState.CANCELLED
    assert not walk.scheduler.abort(request.request_id)
    assert walk.scheduler.meters.finished["cancelled"] == 1
    walk.drain()


@STATES
def test_own_deadline_at_any_stage(state: RequestState) -> None:
    walk = small_walk(state)
    request = in_state(walk, state)
    request.deadline_s = walk.clock.now_s() + 2.0
    walk.clock.advance(1.9)
    walk.scheduler.expire()
    assert request.state is state
    walk.clock.advance(0.1)
    walk.scheduler.expire()
    walk.settle()
    assert request.state is RequestState.TIMEOUT
    assert request.ending is not None and isinstance(request.ending.error, DeadlineError)
    assert request.ending.error.http_status == 408
    walk.drain()


@pytest.mark.parametrize("state", [RequestState.PENDING, RequestState.PROCESSING])
def test_request_timeout_counts_from_the_running_set(state: RequestState) -> None:
    walk = small_walk(state, request_timeout_s=10.0)
    request = in_state(walk, state)
    walk.clock.advance(9.9)
    walk.scheduler.expire()
    assert request.state is state
    walk.clock.advance(0.2)
    walk.scheduler.expire()
    walk.settle()
    assert request.state is RequestState.TIMEOUT
    assert request.ending is not None and "http.request_timeout_s" in str(request.ending.error)
    walk.drain()


def test_the_queue_has_a_limit_of_its_own() -> None:
    walk = small_walk(RequestState.QUEUED, request_timeout_s=100.0, queue_timeout_s=5.0)
    request = in_state(walk, RequestState.QUEUED)
    walk.clock.advance(5.0)
    walk.scheduler.expire()
    walk.settle()
    assert request.state is RequestState.TIMEOUT
    assert request.ending is not None and "http.queue_timeout_s" in str(request.ending.error)
    assert walk.requests[1].state is RequestState.PROCESSING  # no longer waiting, so not overdue
    walk.drain()


def test_waiting_does_not_count_as_running() -> None:
    walk = small_walk(RequestState.QUEUED, request_timeout_s=10.0)
    request = in_state(walk, RequestState.QUEUED)
    walk.clock.advance(8.0)
    walk.scheduler.abort(1)
    step(walk)
    walk.clock.advance(8.0)
    walk.scheduler.expire()
    assert request.state is RequestState.PROCESSING
    walk.drain()


@pytest.mark.parametrize("how", ["abort", "complete", "expire"])
def test_in_flight_ends_at_once_and_leaves_when_its_step_lands(how: str) -> None:
    walk = new_walk()
    request = add(walk, tokens(5), new=9, timeout_s=3.0)
    step(walk)
    plan = walk.begin_step()
    assert plan is not None
    if how == "expire":
        walk.clock.advance(3.0)
        walk.scheduler.expire()
    else:
        assert getattr(walk.scheduler, how)(1)
    walk.settle()
    expected = {"abort": RequestState.CANCELLED, "complete": RequestState.COMPLETED, "expire": RequestState.TIMEOUT}
    assert walk.ended[1] is expected[how]  # the client hears of it now
    assert request.row >= 0 and walk.cache.counts().active > 0  # but the step still writes its KV
    assert walk.scheduler.abandoned(plan)
    walk.end_step(plan)
    assert request.row < 0 and walk.cache.counts().active == 0
    assert request.output_len == 1  # the token of the step that was in flight does not count
    walk.drain()


def test_the_first_ending_counts() -> None:
    walk = new_walk()
    request = add(walk, tokens(5), new=9)
    step(walk)
    plan = walk.begin_step()
    assert plan is not None
    walk.scheduler.complete(1)
    walk.scheduler.abort(1)
    walk.end_step(plan)
    assert request.state is RequestState.COMPLETED
    assert request.ending is not None and request.ending.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("failure", ["step", "row"])
def test_an_ending_outweighs_a_failure(failure: str) -> None:
    walk = new_walk()
    request = add(walk, tokens(5), new=9)
    step(walk)
    plan = walk.begin_step()
    assert plan is not None
    walk.scheduler.abort(1)
    if failure == "step":
        walk.end_step(plan, broken=True)
    else:
        result = walk.backend.forward(plan)
        result.errors[0] = "the logits are not finite"
        walk.land(result)
    assert request.state is RequestState.CANCELLED
    assert walk.cache.peek(request.tokens) == 5  # of the failed step, nothing is kept
    walk.drain()


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    walk = new_walk(max_batch_size=2, policy="fcfs")
    for start in range(1, 5):
        add(walk, tokens(5, start=start), new=3)
    assert sorted(ids(step(walk, broken=True))) == [1, 2]
    assert walk.ended == {1: RequestState.FAILED, 2: RequestState.FAILED}
    assert "provoked" in str(walk.requests[1].ending)
    walk.drain()
    assert walk.ended[3] is walk.ended[4] is RequestState.COMPLETED


def test_a_failed_row_ends_one_request() -> None:
    walk = new_walk()
    for start in (1, 2):
        add(walk, tokens(5, start=start), new=3)
    plan = walk.begin_step()
    assert plan is not None
    result = walk.backend.forward(plan)
    result.errors[1] = "the logits are not finite"
    walk.land(result)
    assert walk.ended == {ids(plan)[1]: RequestState.FAILED}
    walk.drain()


def test_abort_during_the_own_prefill() -> None:
    walk = new_walk(chunked_prefill_size=16, max_prefill_tokens=16)
    add(walk, tokens(60, start=1))
    add(walk, tokens(10, start=2))
    step(walk)
    plan = walk.begin_step()
    assert plan is not None and ids(plan) == [1]
    walk.scheduler.abort(1)
    walk.end_step(plan)
    assert walk.ended[1] is RequestState.CANCELLED
    assert ids(step(walk)) == [2]
    walk.drain()


def test_abort_between_two_chunks() -> None:
    walk = new_walk(chunked_prefill_size=16, max_prefill_tokens=16)
    add(walk, tokens(60, start=1))
    add(walk, tokens(10, start=2))
    step(walk)
    walk.scheduler.abort(1)
    walk.settle()
    assert ids(step(walk)) == [2]
    walk.drain()


def test_length_gives_exactly_max_new_tokens() -> None:
    walk = new_walk()
    for new in range(1, 6):
        add(walk, tokens(5, start=new), new=new)
    steps_until_done(walk)
    assert [walk.requests[n].output_len for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert walk.scheduler.meters.finished["completed"] == 5


def test_an_end_token_ends_at_once() -> None:
    prompt = tokens(5)
    token = next_token(kv_values(prompt, np.arange(5, dtype=np.int32)), VOCAB)
    walk = new_walk()
    add(walk, prompt, new=9, stop_token_ids=(token,))
    later = add(walk, prompt, new=9, stop_token_ids=(token,), min_tokens=1)
    step(walk)
    request = walk.requests[1]
    assert request.ending is not None
    assert (request.ending.finish_reason, request.ending.stop_token) == (FinishReason.STOP, token)
    assert walk.tokens[1][5:] == [token]
    steps_until_done(walk)
    assert later.output_ids[0] != token  # it was banned
    walk.drain()


def test_a_place_that_becomes_free_is_filled_in_the_next_plan() -> None:
    walk = new_walk(max_batch_size=1, max_concurrent_requests=1)
    add(walk, tokens(5, start=1), new=1)
    add(walk, tokens(5, start=2), new=1)
    assert ids(step(walk)) == [1]
    assert ids(step(walk)) == [2]


def test_a_place_left_by_a_deadline_is_filled_in_the_same_plan() -> None:
    """Found by the simulator: nothing was planned although somebody waited, until the next arrival or timer."""
    walk = new_walk(max_batch_size=1, max_concurrent_requests=1)
    first = add(walk, tokens(8))
    late = add(walk, tokens(8, start=2), timeout_s=1.0)
    third = add(walk, tokens(8, start=3))
    plan = walk.begin_step()
    walk.scheduler.abort(first.request_id)
    assert walk.begin_step() is None  # its place in the batch is taken until its step has landed
    assert late.state is RequestState.PENDING
    walk.clock.advance(2.0)
    walk.end_step(plan)
    assert ids(step(walk)) == [third.request_id]
    assert late.state is RequestState.TIMEOUT


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 - 1])
def test_a_seed_fixes_the_tokens_whatever_runs_beside(seed: int) -> None:
    texts = []
    for crowd in range(3):
        walk = new_walk()
        for k in range(crowd):
            add(walk, tokens(7, start=30 + k), new=8)
        request = add(walk, tokens(9), new=8, temperature=1.0, seed=seed)
        steps_until_done(walk)
        texts.append(request.output_ids.tolist())
    assert texts[0] == texts[1] == texts[2]


def test_without_a_seed_two_requests_differ_and_runs_agree() -> None:
    def texts() -> list[list[int]]:
        walk = new_walk()
        for _ in range(2):
            add(walk, tokens(9), new=8, temperature=1.0)
        steps_until_done(walk)
        return [walk.requests[k].output_ids.tolist() for k in (1, 2)]

    first = texts()
    assert first[0] != first[1]
    assert first == texts()


def test_complete_of_what_has_not_run_is_our_own_fault() -> None:
    walk = new_walk()
    add(walk, tokens(5))
    with pytest.raises(RuntimeError):
        walk.scheduler.complete(1)
    assert not walk.scheduler.complete(77)
    walk.drain()


def test_plan_gives_none_only_while_everything_is_in_flight_or_done() -> None:
    walk = new_walk()
    assert walk.scheduler.plan() is None
    add(walk, tokens(5), new=2)
    assert walk.begin_step() is not None
    assert walk.begin_step() is not None
    assert walk.scheduler.plan() is None  # both of its tokens are on their way
    walk.end_step()
    walk.end_step()
    walk.drain()


def test_a_retracted_request_can_be_complete() -> None:
    walk = new_walk()
    request = add(walk, tokens(5), new=9)
    step(walk)
    walk.scheduler._retract(request)
    walk.settle()
    assert request.state is RequestState.PENDING
    assert walk.scheduler.complete(1)
    walk.settle()
    assert walk.ended[1] is RequestState.COMPLETED
    walk.drain()


def test_a_crowd_passes_a_small_door() -> None:
    walk = new_walk(max_queue_size=2000, max_batch_size=32, max_concurrent_requests=32, capacity=2048)
    for k in range(300):
        walk.scheduler.add(k, tokens(20, start=1 + k % 40), SamplingParams(max_new_tokens=2, temperature=0))
    steps = 0
    while walk.scheduler.has_work:
        plan = walk.scheduler.plan()
        assert plan is not None
        walk.scheduler.apply(plan, walk.backend.forward(plan))
        steps += 1
    walk.scheduler.check()
    assert walk.scheduler.meters.finished["completed"] == 300
    assert steps < 100
