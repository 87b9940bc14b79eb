"""Models whose state belongs to a whole sequence: a conversation goes on, nothing else is reused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.property.walk import Walk
from tests.scheduler.rig import add, new_walk, step, steps_until_done, tokens
from weft.core.errors import InvalidRequestError
from weft.core.request import Request
from weft.scheduler.scheduler import Scheduler


def whole_walk(**more: object) -> Walk:
    return new_walk(**({"num_sequences": 4, "shares": False} | more))  # type: ignore[arg-type]


def next_turn(request: Request, length: int = 9) -> np.ndarray:
    return np.concatenate([request.tokens, tokens(length, start=7)])


def test_a_conversation_goes_on_where_it_ended() -> None:
    walk = whole_walk()
    first = add(walk, tokens(30), new=4)
    steps_until_done(walk)
    second = add(walk, next_turn(first), new=4)
    assert step(walk).num_tokens == 10  # the last token of the answer, and the new ones
    steps_until_done(walk)
    assert second.reused_tokens == 33
    assert walk.cache.counts().cached == second.cached_len, "the first turn's state went on"
    walk.drain()


@pytest.mark.parametrize(("common", "own"), [(20, 0), (32, 2), (33, 0)])
def test_a_part_of_a_sequence_is_no_use(common: int, own: int) -> None:
    walk = whole_walk()
    first = add(walk, tokens(30), new=4)
    steps_until_done(walk)
    other = add(walk, np.concatenate([first.tokens[:common], tokens(own + 1, start=9)[1:]]), new=1)
    steps_until_done(walk)
    assert other.reused_tokens == 0
    walk.drain()


def test_two_that_go_on_from_one_do_not_share_it() -> None:
    walk = whole_walk()
    first = add(walk, tokens(30), new=4)
    steps_until_done(walk)
    both = [add(walk, next_turn(first, length), new=4) for length in (5, 6)]
    assert step(walk).num_rows == 2, "the second does not wait for the first either"
    steps_until_done(walk)
    assert sorted(request.reused_tokens for request in both) == [0, 33]
    walk.drain()


def test_kept_sequences_make_room_for_ids_and_tokens() -> None:
    walk = whole_walk(num_sequences=2, capacity=100)
    for start in range(1, 6):
        add(walk, tokens(40, start=start), new=4)
        steps_until_done(walk)
    assert len(walk.cache.whole) == 2 and walk.cache.evicted_total == 3 * 43
    add(walk, tokens(90, start=9), new=4)
    steps_until_done(walk)
    assert len(walk.cache.whole) == 1
    walk.drain()


def test_the_same_conversation_is_kept_once() -> None:
    walk = whole_walk()
    for _ in range(2):
        add(walk, tokens(30), new=1)
        steps_until_done(walk)
    assert len(walk.cache.whole) == 1
    walk.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_that_a_broken_step_has_changed_is_not_kept(depth: int) -> None:
    walk = whole_walk(depth=depth, chunked_prefill_size=64)
    request = add(walk, tokens(200), new=4)
    walk.begin_step()
    walk.end_step()
    walk.begin_step()
    walk.scheduler.abort(request.request_id)
    walk.settle()
    walk.end_step(cancel=True)
    assert len(walk.cache.whole) == 0
    again = add(walk, tokens(200), new=4)
    steps_until_done(walk)
    assert again.reused_tokens == 0 and again.output_len == 4
    walk.drain()


def test_a_state_beyond_what_is_known_is_not_kept() -> None:
    """A text that is complete while the step after its last token is in flight."""
    walk = whole_walk(depth=2)
    request = add(walk, tokens(20), new=10)
    walk.turn()
    walk.turn()
    assert walk.flights, "a step is in flight"
    walk.begin_step()
    walk.scheduler.complete(request.request_id)
    walk.settle()
    while walk.flights:
        walk.end_step()
    kept = walk.cache.whole.oldest()
    assert kept is None or len(kept) == len(request.tokens)
    again = add(walk, next_turn(request), new=2)
    steps_until_done(walk)
    assert again.output_len == 2
    walk.drain()


def test_a_retracted_request_goes_on_with_its_state() -> None:
    walk = whole_walk(capacity=200, ratio=0.0, max_context=400)
    requests = [add(walk, tokens(60, start=start), new=60) for start in (1, 2)]
    steps_until_done(walk)
    assert walk.scheduler.meters.retractions > 0
    assert all(request.output_len == 60 for request in requests)
    walk.drain()


def test_sessions_are_refused() -> None:
    walk = whole_walk()
    scheduler: Scheduler = walk.scheduler
    request = add(walk, tokens(5))
    with pytest.raises(InvalidRequestError, match="X-Session-ID: 's' is not allowed: the KV of this model"):
        scheduler.add(99, tokens(5), request.params, session_id="s")
    walk.drain()


def test_retain_none_keeps_nothing() -> None:
    walk = whole_walk(retain="none")
    first = add(walk, tokens(30), new=4)
    steps_until_done(walk)
    assert walk.cache.counts().cached == 0
    again = add(walk, next_turn(first), new=1)
    steps_until_done(walk)
    assert again.reused_tokens == 0
    walk.drain()


def test_flush_and_reset() -> None:
    walk = whole_walk()
    for forget in (walk.cache.flush, walk.cache.reset):
        add(walk, tokens(30), new=1)
        steps_until_done(walk)
        forget()
        assert walk.cache.counts().free == walk.cache.capacity
    walk.drain()
