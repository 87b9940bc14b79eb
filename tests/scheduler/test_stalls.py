"""How long running streams wait for somebody's prompt, on the fake backend's virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scheduler.rig import add, new_walk, tokens
from weft.backends.fake.backend import FakeBackend
from weft.scheduler.speed import MIN_STEP_TOKENS, Speed

SPEED = 1000.0
"""Tokens a second."""

CHUNK = 512

STALL_S = 0.2


def longest_gap_s(
    *,
    long_prompts: int,
    mixed: bool = True,
    depth: int = 1,
    stall_s: float | None = None,
    cost_s: Callable[[float], float] = lambda seconds: seconds,
) -> float:
    """The longest wait between two tokens of any of four streams while prompts of 100k tokens come in.

    `cost_s` turns the seconds that a step's tokens take at `SPEED` into those that it takes.
    """
    walk = new_walk(
        capacity=450_000,
        max_context=120_000,
        mixed=mixed,
        depth=depth,
        chunked_prefill_size=CHUNK,
        max_prefill_tokens=4096,
        max_decode_stall_s=stall_s,
    )
    walk.backend = FakeBackend(
        vocab_size=50,
        max_context_tokens=120_000,
        tokens_per_s=SPEED,
        sleep=lambda seconds: walk.clock.advance(cost_s(seconds)),
    )
    walk.backend.allocate_kv(walk.cache.capacity)
    walk.scheduler.check = lambda: None  # type: ignore[method-assign]  # proving half a million slots takes a while
    streams = [add(walk, tokens(5, start=start), new=60) for start in range(1, 5)]
    while any(r.output_len < 10 for r in streams):
        walk.turn()
    for start in range(long_prompts):
        add(walk, tokens(100_000, start=10 + start), new=1)
    heard = {r.request_id: (r.output_len, walk.clock.now_s()) for r in streams}
    longest = 0.0
    while any(not r.state.terminal for r in streams):
        walk.turn()
        now = walk.clock.now_s()
        for request in streams:
            count, since = heard[request.request_id]
            if request.output_len > count:
                longest = max(longest, now - since)
                heard[request.request_id] = (request.output_len, now)
    return longest


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("long_prompts", [1, 3])
def test_a_long_prompt_stalls_streams_for_one_chunk_at_most(long_prompts: int, mixed: bool, depth: int) -> None:
    rows = 4
    own_steps = 1 if mixed else 2  # unmixed, the streams' own step comes after the chunk
    bound_s = (CHUNK + own_steps * rows) / SPEED
    assert longest_gap_s(long_prompts=long_prompts, mixed=mixed, depth=depth) <= bound_s + 1e-6


def uneven_s(seconds: float) -> float:
    """A step has a fixed cost, and small steps are the dearest per token."""
    tokens = seconds * SPEED
    return 0.05 + 0.015 * min(tokens, 32) + 0.004 * max(0.0, tokens - 32)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cost_s", [lambda s: s, lambda s: 10 * s, uneven_s], ids=["fast", "slow", "uneven"])
def test_prompts_beside_streams_are_budgeted_by_time(cost_s: Callable[[float], float], depth: int) -> None:
    """No step with a prompt takes longer than the limit, and what the limit leaves is used."""
    longest_s = longest_gap_s(long_prompts=2, stall_s=STALL_S, cost_s=cost_s, depth=depth)
    assert 0.5 * STALL_S <= longest_s <= STALL_S


def test_the_budget_follows_an_engine_that_becomes_slower() -> None:
    speed = Speed()
    for _ in range(3):
        speed.note_step("decode", 4, 0.02)
    speed.note_step("extend", 512, 0.5, 512)
    quick = speed.prompt_tokens_in(STALL_S)
    assert quick == int(512 / 0.5 * (0.8 * STALL_S - 0.02))
    speed.note_step("mixed", quick + 4, 0.4, quick)  # took longer than was thought
    slow = speed.prompt_tokens_in(STALL_S)
    assert slow < quick / 2
    speed.note_step("mixed", slow + 4, 0.1, slow)
    assert slow < speed.prompt_tokens_in(STALL_S) < quick


def test_prompts_go_on_however_slow_the_engine_is() -> None:
    speed = Speed()
    speed.note_step("decode", 4, 1.0)
    speed.note_step("mixed", 20, 5.0, 16)
    assert speed.prompt_tokens_in(STALL_S) == MIN_STEP_TOKENS


def test_without_long_prompts_nobody_waits() -> None:
    assert longest_gap_s(long_prompts=0) == pytest.approx(4 / SPEED)
