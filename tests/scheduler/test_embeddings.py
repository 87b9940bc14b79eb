"""Requests for vectors: a whole prompt in one step, nothing reused, nothing kept, no token."""

from __future__ import annotations

import pytest

from tests.property.walk import Walk
from tests.scheduler.rig import add, ids, new_walk, shares, step, steps_until_done, tokens
from weft.core.errors import InvalidRequestError
from weft.core.plan import StepResult
from weft.core.request import FinishReason, Request, RequestState


def embed(walk: Walk, length: int, *, start: int = 1, **more: object) -> Request:
    return add(walk, tokens(length, start=start), new=None, embed=True, **more)


def test_one_step_and_no_token() -> None:
    walk = new_walk()
    request = embed(walk, 40)
    plan = step(walk)
    assert plan.embeds == (0,) and not plan.emits.any() and not plan.sampling
    assert request.ending is not None and request.ending.finish_reason is FinishReason.STOP
    assert (request.state, request.output_len, request.retractions) == (RequestState.COMPLETED, 0, 0)
    assert walk.cache.counts().cached == 0
    assert walk.scheduler.meters.generation_tokens == 0 and walk.scheduler.meters.prefill_time.counts[0] == 1
    walk.drain()


def test_equal_prompts_share_a_step_and_nothing_else() -> None:
    walk = new_walk()
    requests = [embed(walk, 40) for _ in range(5)]
    assert shares(step(walk)) == {request.request_id: 40 for request in requests}
    again = embed(walk, 40)
    assert shares(step(walk)) == {again.request_id: 40}
    assert again.miss is not None and again.miss.reason == "not_used"
    walk.drain()


def test_a_step_takes_texts_up_to_its_budget_and_a_longer_one_alone() -> None:
    walk = new_walk(max_prefill_tokens=100, chunked_prefill_size=16, policy="fcfs")
    for length in (60, 40, 60, 300, 10):
        embed(walk, length, start=length % 49)
    assert [list(shares(plan).values()) for plan in steps_until_done(walk)] == [[60, 40], [60], [300], [10]]


def test_up_to_the_last_token_of_the_context() -> None:
    walk = new_walk(max_context=64)
    embed(walk, 64)
    with pytest.raises(InvalidRequestError, match="65 tokens, but at most 64 are allowed"):
        embed(walk, 65)
    walk.drain()


def test_a_bad_row_ends_alone() -> None:
    walk = new_walk()
    good, bad = embed(walk, 10, start=1), embed(walk, 10, start=2)
    plan = walk.begin_step()
    assert plan is not None
    result = walk.backend.forward(plan)
    result.embeddings.pop(1)
    walk.land(StepResult(result.tokens, errors={1: "not finite"}, embeddings=result.embeddings))
    assert (good.state, bad.state) == (RequestState.COMPLETED, RequestState.FAILED)
    walk.drain()


@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_was_broken_off_is_taken_again(length: int, depth: int) -> None:
    walk = new_walk(depth=depth)
    gone, stays = embed(walk, 200, start=1), embed(walk, length, start=2)
    plan = walk.begin_step()
    assert plan is not None and ids(plan) == [gone.request_id, stays.request_id]
    walk.scheduler.abort(gone.request_id)
    assert walk.scheduler.abandoned(plan)
    walk.end_step(plan, cancel=True)
    assert (gone.state, stays.state) == (RequestState.CANCELLED, RequestState.PENDING)
    walk.drain()
    assert stays.state is RequestState.COMPLETED


def test_beside_requests_that_generate() -> None:
    walk = new_walk(chunked_prefill_size=16, max_prefill_tokens=64)
    talks = add(walk, tokens(20, start=3), new=8)
    step(walk)
    wants = embed(walk, 50, start=4)
    steps_until_done(walk)
    assert talks.output_len == 8 and wants.state is RequestState.COMPLETED and wants.chunks == 1
    walk.drain()
