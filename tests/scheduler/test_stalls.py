"""How long running streams wait for somebody's prompt, on the fake backend's virtual clock."""

from __future__ import annotations

import pytest

from tests.scheduler.rig import add, new_walk, tokens
from weft.backends.fake.backend import FakeBackend

SPEED = 1000.0
"""Tokens a second."""

CHUNK = 512


def longest_gap_s(*, long_prompts: int, mixed: bool = True, depth: int = 1) -> float:
    """The longest wait between two tokens of any of four streams while prompts of 100k tokens come in."""
    walk = new_walk(
        capacity=450_000,
        max_context=120_000,
        mixed=mixed,
        depth=depth,
        chunked_prefill_size=CHUNK,
        max_prefill_tokens=4096,
    )
    walk.backend = FakeBackend(vocab_size=50, max_context_tokens=120_000, tokens_per_s=SPEED, sleep=walk.clock.advance)
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


def test_without_long_prompts_nobody_waits() -> None:
    assert longest_gap_s(long_prompts=0) == pytest.approx(4 / SPEED)
