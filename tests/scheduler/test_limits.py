"""What is refused on arrival, with which words, and that nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.property.walk import VOCAB, Walk
from tests.scheduler.rig import add, new_walk, step, steps_until_done, tokens
from weft.core.errors import InvalidRequestError, QueueFullError
from weft.core.request import FinishReason, RequestState
from weft.core.sampling import SamplingParams


def refused(walk: Walk, prompt: np.ndarray, **params: Any) -> InvalidRequestError:
    before = walk.scheduler.meters.finished["rejected"]
    with pytest.raises(InvalidRequestError) as caught:
        walk.scheduler.add(1, prompt.astype(np.int32), SamplingParams(**params))
    assert not walk.scheduler.has_work
    assert walk.scheduler.meters.finished["rejected"] == before + 1
    walk.settle()
    return caught.value


def test_a_prompt_over_the_context_names_both_numbers() -> None:
    walk = new_walk(max_context=100)
    error = refused(walk, tokens(100))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "100 tokens" in error.message and "99" in error.message
    add(walk, tokens(99), new=1)
    walk.drain()


def test_a_prompt_over_the_kv_cache_is_refused_too() -> None:
    walk = new_walk(capacity=64, max_context=1000)
    error = refused(walk, tokens(64))
    assert error.code == "context_length_exceeded"
    assert "64 tokens" in error.message and "63" in error.message


def test_max_tokens_over_the_context() -> None:
    walk = new_walk(max_context=100)
    error = refused(walk, tokens(60), max_new_tokens=41)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert "60 prompt tokens" in error.message and "41 new ones" in error.message and "at most 40" in error.message
    add(walk, tokens(60), new=40)
    walk.drain()


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (np.empty(0), {}, "prompt"),
        (np.array([1, VOCAB]), {}, "prompt"),
        (np.array([1, -1]), {}, "prompt"),
        (np.array([1]), {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        (np.array([1]), {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_bad_tokens(prompt: np.ndarray, params: dict[str, Any], param: str) -> None:
    assert refused(new_walk(), prompt, **params).param == param


def test_own_limits_of_input_and_output() -> None:
    walk = new_walk(max_input_tokens=10, max_output_tokens=5)
    assert refused(walk, tokens(11)).code == "context_length_exceeded"
    assert refused(walk, tokens(10), max_new_tokens=6).param == "max_tokens"
    unlimited = add(walk, tokens(10), new=None)
    steps_until_done(walk)
    assert unlimited.output_len == 5


@pytest.mark.parametrize(("new", "expected"), [(None, 44), (60, 44), (44, 44), (43, 43)])
def test_what_the_kv_cache_cannot_hold_ends_with_length(new: int | None, expected: int) -> None:
    walk = new_walk(capacity=64, page_size=16, max_context=1000)
    request = add(walk, tokens(20), new=new)
    steps_until_done(walk)
    assert request.output_len == expected
    assert request.ending is not None and request.ending.finish_reason is FinishReason.LENGTH
    walk.drain()


def full_walk(**limits: Any) -> Walk:
    """One request runs, two wait in a queue of two."""
    walk = new_walk(max_queue_size=2, max_concurrent_requests=1, max_batch_size=1, **limits)
    for start in range(1, 4):
        add(walk, tokens(5, start=start), new=2)
    assert [len(c) for c in (walk.scheduler.queued, walk.scheduler.pending)] == [2, 1]
    return walk


def refusal(walk: Walk) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        walk.scheduler.add(99, tokens(5), SamplingParams())
    walk.settle()
    return caught.value


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    walk = full_walk()
    error = refusal(walk)
    assert error.http_status == 429
    assert "2 requests" in error.message
    assert [r.request_id for r in walk.scheduler.live] == [2, 3, 1]
    assert walk.scheduler.meters.finished["rejected"] == 1
    step(walk)
    assert refusal(walk)
    step(walk)  # the first has ended: there is room again
    add(walk, tokens(5))
    walk.drain()


def test_retry_after_is_how_long_half_of_the_queue_takes() -> None:
    walk = full_walk()
    assert refusal(walk).retry_after_s == 1.0  # nothing is known yet
    for _ in range(2):  # the first request: 5 + 1 tokens in 6 seconds, 2 of them output
        plan = walk.begin_step()
        assert plan is not None
        walk.clock.advance(float(plan.num_tokens))
        walk.end_step(plan)
    add(walk, tokens(50, start=9), new=2)
    # Two wait, 5 and 50 tokens; one of the running set's places has been taken by the second.
    queued = sum(len(r.tokens) - 1 for r in walk.scheduler.queued.values())
    outputs = 2 * len(walk.scheduler.queued)
    assert refusal(walk).retry_after_s == pytest.approx((queued + outputs) / 2)


def test_what_is_cached_does_not_count_as_waiting_work() -> None:
    walk = new_walk(max_queue_size=1, max_concurrent_requests=1, max_batch_size=1)
    add(walk, tokens(100, start=3), new=1)
    plan = walk.begin_step()
    assert plan is not None
    walk.clock.advance(100.0)
    walk.end_step(plan)
    add(walk, tokens(30, start=4), new=1)
    add(walk, tokens(100, start=3), new=1)  # waits, but all of it is cached
    assert refusal(walk).retry_after_s == 1.0


def test_a_better_request_displaces_the_worst_of_a_full_queue() -> None:
    walk = full_walk(priority=True)
    for request_id, priority in ((2, 3), (3, 3)):
        assert walk.requests[request_id].request_id == request_id
        walk.requests[request_id].priority = priority
    better = add(walk, tokens(5, start=9), priority=2)
    assert walk.ended == {3: RequestState.REJECTED}  # of the worst, the last to come
    error = walk.requests[3].ending
    assert error is not None and error.error is not None
    assert (error.error.http_status, error.error.code) == (503, "displaced")
    assert better.state is RequestState.QUEUED
    with pytest.raises(QueueFullError):
        walk.scheduler.add(99, tokens(5), SamplingParams(), priority=3)  # no better than the worst
    assert walk.scheduler.meters.rejections == {"queue_full": 1, "invalid": 0, "displaced": 1}
    walk.settle()
    walk.drain()


def test_without_priorities_nobody_is_displaced() -> None:
    walk = full_walk(priority=False)
    with pytest.raises(QueueFullError):
        walk.scheduler.add(99, tokens(5), SamplingParams(), priority=-5)


def test_a_queue_of_any_length_moves_into_free_places_at_once() -> None:
    walk = new_walk(max_queue_size=1, max_concurrent_requests=8)
    for start in range(1, 9):
        add(walk, tokens(5, start=start))
    assert len(walk.scheduler.pending) == 8
    walk.drain()


def test_an_id_cannot_be_used_twice_at_once() -> None:
    walk = new_walk()
    add(walk, tokens(5))
    with pytest.raises(RuntimeError):
        walk.scheduler.add(1, tokens(5), SamplingParams())
    walk.settle()
    assert walk.requests[1].state is RequestState.PENDING
