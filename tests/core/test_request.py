"""The state machine, the length vocabulary, and how a token ends a request."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from weft.core.errors import CancelledError, InvariantError
from weft.core.request import Ending, FinishReason, Request, RequestState
from weft.core.sampling import SamplingParams

S = RequestState
ALLOWED = {
    (S.QUEUED, S.PENDING),
    (S.QUEUED, S.REJECTED),
    (S.QUEUED, S.CANCELLED),
    (S.QUEUED, S.TIMEOUT),
    (S.PENDING, S.PROCESSING),
    (S.PENDING, S.CANCELLED),
    (S.PENDING, S.TIMEOUT),
    (S.PENDING, S.FAILED),
    (S.PROCESSING, S.COMPLETED),
    (S.PROCESSING, S.TIMEOUT),
    (S.PROCESSING, S.FAILED),
    (S.PROCESSING, S.CANCELLED),
    (S.PROCESSING, S.PENDING),  # retracted
}


def new_request(input_len: int = 3, limit: int = 8, eos: tuple[int, ...] = (), **params: object) -> Request:
    prompt = np.arange(10, 10 + input_len, dtype=np.int32)
    return Request(
        1,
        prompt,
        SamplingParams(**params),  # type: ignore[arg-type]
        max_device_len=limit,
        seed=0,
        eos_token_ids=eos,
    )


def ending_in(state: RequestState) -> Ending:
    if state is S.COMPLETED:
        return Ending(state, FinishReason.STOP)
    return Ending(state, error=CancelledError("a test's ending"))


def enter(request: Request, state: RequestState) -> None:
    """Asks for one edge by the method that stands for it."""
    if state is S.PENDING:
        request.admit(1.0)
    elif state is S.PROCESSING:
        request.schedule(2.0)
    else:
        request.finish(ending_in(state), 3.0)


def request_in(state: RequestState) -> Request:
    request = new_request()
    paths = {
        S.QUEUED: [],
        S.PENDING: [S.PENDING],
        S.PROCESSING: [S.PENDING, S.PROCESSING],
        S.REJECTED: [S.REJECTED],
        S.COMPLETED: [S.PENDING, S.PROCESSING, S.COMPLETED],
        S.TIMEOUT: [S.TIMEOUT],
        S.FAILED: [S.PENDING, S.FAILED],
        S.CANCELLED: [S.CANCELLED],
    }
    for step in paths[state]:
        enter(request, step)
    assert request.state is state
    return request


@pytest.mark.parametrize(("old", "new"), [pair for pair in product(S, S) if pair[1] is not S.QUEUED])
def test_every_edge(old: RequestState, new: RequestState) -> None:
    request = request_in(old)
    if (old, new) in ALLOWED:
        enter(request, new)
        assert request.state is new
    else:
        with pytest.raises(InvariantError):
            enter(request, new)
        assert request.state is old


def test_times_are_kept() -> None:
    request = request_in(S.COMPLETED)
    assert (request.admitted_s, request.first_scheduled_s, request.finished_s) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    "ending",
    [
        Ending(S.PROCESSING),
        Ending(S.COMPLETED),  # without a finish reason
        Ending(S.FAILED, FinishReason.STOP),  # with one
    ],
)
def test_what_is_no_ending_is_refused(ending: Ending) -> None:
    request = request_in(S.PROCESSING)
    with pytest.raises(InvariantError):
        request.finish(ending, 0.0)
    assert request.ending is None


@pytest.mark.parametrize(("input_len", "limit"), [(0, 4), (4, 4), (5, 4)])
def test_a_prompt_must_leave_room_for_a_token(input_len: int, limit: int) -> None:
    with pytest.raises(InvariantError):
        new_request(input_len, limit)


def test_lengths() -> None:
    request = new_request(input_len=3, limit=8)
    assert (request.extend_len, request.output_len, request.remaining_tokens) == (3, 0, 5)
    request.depart(2, emits=False)
    assert (request.extend_len, request.expected_len, request.cached_len) == (1, 3, 0)
    request.depart(1, emits=True)  # planned while the first is in flight
    assert (request.extend_len, request.expected_len, request.in_flight) == (1, 4, 2)
    request.land(emits=False)
    request.advance(2)
    request.land(emits=True)
    request.advance(1)
    request.append(40)
    assert (request.extend_len, request.output_len, request.remaining_tokens) == (1, 1, 4)
    assert (request.in_flight, request.last_token) == (0, 40)
    assert request.prompt_ids.tolist() == [10, 11, 12]
    assert request.output_ids.tolist() == [40]
    assert request.tokens.tolist() == [10, 11, 12, 40]
    for computed in (2, -1):
        with pytest.raises(InvariantError):
            request.advance(computed)
    for computed in (0, 2):
        with pytest.raises(InvariantError):
            request.depart(computed, emits=True)
    with pytest.raises(InvariantError):
        request.land(emits=True)


def test_retraction_forgets_what_is_computed_and_keeps_what_is_said() -> None:
    request = request_in(S.PROCESSING)
    request.depart(3, emits=True)
    with pytest.raises(InvariantError):
        request.retract(3.0)  # its step still writes
    request.land(emits=True)
    request.advance(3)
    request.append(40)
    request.retract(3.0)
    assert (request.state, request.retractions, request.cached_len, request.extend_len) == (S.PENDING, 1, 0, 4)
    assert request.output_ids.tolist() == [40]
    assert [state for state, _ in request.history] == [S.QUEUED, S.PENDING, S.PROCESSING, S.PENDING]


def test_limit_ends_with_length_and_nothing_follows() -> None:
    request = new_request(input_len=3, limit=5)
    assert request.append(40) is None
    assert request.append(41) == Ending(S.COMPLETED, FinishReason.LENGTH)
    with pytest.raises(InvariantError):
        request.append(42)


def test_tokens_survive_growth() -> None:
    request = new_request(input_len=3, limit=1000)
    for token in range(997):
        request.append(token)
    assert request.output_ids.tolist() == list(range(997))


def test_end_token_comes_before_length() -> None:
    request = new_request(input_len=3, limit=4, eos=(7,))
    ending = request.append(7)
    assert ending is not None
    assert (ending.finish_reason, ending.stop_token) == (FinishReason.STOP, 7)
    assert request.output_len == 1  # it counts as generated


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, True),
        ({"ignore_eos": True}, False),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, True),
        ({"stop_token_ids": (8,)}, True),
        ({"min_tokens": 1}, False),
    ],
)
def test_what_ends_a_text(params: dict[str, object], ends: bool) -> None:
    request = new_request(eos=(7,), **params)
    assert (request.append(7) is not None) is ends


def test_min_tokens_are_generated_before_an_end_token_counts() -> None:
    request = new_request(eos=(7,), min_tokens=2)
    assert request.append(7) is None
    assert request.append(7) is None
    assert request.append(7) is not None
