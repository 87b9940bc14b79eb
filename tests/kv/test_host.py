"""The second tier: what leaves the tree goes to host memory and comes back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.property.walk import Walk, random_walk
from tests.scheduler.rig import add, new_walk, step, steps_until_done, tokens
from weft.core.plan import KvOp, StepPlan
from weft.core.request import CacheMiss, Request
from weft.kv import host as host_module
from weft.kv.host import HostTier
from weft.kv.prefix_cache import PrefixCache
from weft.kv.sequences import Sequences


def tier(walk: Walk) -> HostTier:
    assert walk.cache.host is not None
    return walk.cache.host


def kinds(plan: StepPlan, *wanted: str) -> list[KvOp]:
    return [op for op in plan.kv_ops if op.kind in wanted]


def demoted(walk: Walk, prompt: np.ndarray) -> Request:
    """Computes a prompt, then lets all that is cached go to host memory."""
    request = add(walk, prompt, new=1)
    steps_until_done(walk)
    walk.cache.evict(walk.cache.tree.evictable_tokens)
    assert walk.cache.counts().cached == 0
    return request


def test_what_was_evicted_comes_back_and_is_not_computed_again() -> None:
    walk = new_walk(num_sequences=4, host_tokens=1000, chunked_prefill_size=700)
    prompt = tokens(600)
    demoted(walk, prompt)
    counts = walk.cache.counts()
    assert (counts.host, counts.evicted_total) == (600, 0)
    again = add(walk, prompt, new=3)
    plan = step(walk)
    assert plan.num_tokens == 1
    assert [(op.start, op.end) for op in kinds(plan, "load")] == [(0, 256), (256, 512), (512, 599)]
    assert again.reused_tokens == 599 and again.miss is None
    walk.drain()
    assert tier(walk).restored_total == 599


def test_a_prompt_that_goes_on_from_the_tree_gets_the_rest_from_the_host() -> None:
    walk = new_walk(num_sequences=4, host_tokens=1000, chunked_prefill_size=700)
    prompt = tokens(600)
    demoted(walk, prompt)
    branch = add(walk, np.concatenate([prompt[:300], tokens(9, start=3)]), new=1)  # leaves in the second piece
    steps_until_done(walk)
    assert branch.miss == CacheMiss("diverged", 300)
    add(walk, np.concatenate([prompt, tokens(9, start=4)]), new=1)
    plan = step(walk)
    assert plan.num_tokens == 9
    assert [(op.start, op.end) for op in kinds(plan, "load")] == [(300, 512), (512, 600)]
    walk.drain()


def test_what_came_back_goes_out_again_without_a_copy() -> None:
    walk = new_walk(num_sequences=4, host_tokens=2000, chunked_prefill_size=700)
    prompt = tokens(600)
    demoted(walk, prompt)
    demoted(walk, np.concatenate([prompt, tokens(50, start=2)]))
    add(walk, tokens(5, start=9), new=1)
    plan = step(walk)
    assert sum(op.end - op.start for op in kinds(plan, "save")) == 50
    assert tier(walk).tokens == 650
    walk.drain()


def test_the_host_keeps_what_was_used_last() -> None:
    walk = new_walk(num_sequences=4, host_tokens=500)
    for start in (1, 2, 3):
        demoted(walk, tokens(200, start=start))
    counts = walk.cache.counts()
    assert (counts.host, counts.evicted_total) == (400, 200)
    first = add(walk, tokens(200, start=1), new=1)
    step(walk)
    assert first.reused_tokens == 0 and first.miss == CacheMiss("evicted", 0)
    second = add(walk, tokens(200, start=2), new=1)
    step(walk)
    assert second.reused_tokens == 199
    walk.drain()


def test_the_end_of_a_branch_is_forgotten_before_its_beginning() -> None:
    walk = new_walk(num_sequences=4, host_tokens=500, piece_tokens=100)
    demoted(walk, tokens(800))
    assert tier(walk).tokens == 500
    again = add(walk, tokens(800), new=1)
    step(walk)
    assert again.reused_tokens == 500 and again.miss == CacheMiss("evicted", 500)
    walk.drain()


def test_cold_tokens_go_out_beside_the_steps_of_others() -> None:
    walk = new_walk(num_sequences=8, host_tokens=4000, resident_tokens=300, max_decode_stall_s=None)
    for start in range(1, 5):
        add(walk, tokens(400, start=start), new=1)
        steps_until_done(walk)
    add(walk, tokens(5, start=9), new=6)
    step(walk)
    step(walk)
    assert walk.cache.tree.evictable_tokens <= 300
    assert walk.cache.counts().evicted_total == 0
    walk.drain()


def test_a_retracted_request_goes_on_from_the_host() -> None:
    """Two that outgrow the pool together: nobody computes a prompt twice, and both say what they say alone."""
    walk = new_walk(capacity=200, num_sequences=4, host_tokens=400, ratio=0.0, max_context=400)
    requests = [add(walk, tokens(60, start=start), new=100) for start in (1, 2)]
    plans = steps_until_done(walk)
    assert walk.scheduler.meters.retractions > 0
    assert all(request.output_len == 100 for request in requests)
    computed = sum(plan.num_tokens for plan in plans)
    assert computed <= 2 * 160 + 2 * walk.scheduler.meters.retractions
    assert tier(walk).restored_total > 0
    walk.drain()


def test_flush_forgets_both_tiers() -> None:
    walk = new_walk(num_sequences=4, host_tokens=1000)
    demoted(walk, tokens(300))
    walk.cache.flush()
    assert walk.cache.counts().host == 0
    again = add(walk, tokens(300), new=1)
    step(walk)
    assert again.reused_tokens == 0
    walk.drain()


def test_reset_forgets_both_tiers() -> None:
    walk = new_walk(num_sequences=4, host_tokens=1000)
    demoted(walk, tokens(300))
    add(walk, tokens(20, start=2), new=1)
    steps_until_done(walk)
    walk.cache.evict(20)
    walk.cache.reset()
    assert walk.backend.cells is not None
    walk.backend.cells.do(walk.cache.take_ops())
    assert not walk.backend.cells.used and not walk.backend.cells.pieces
    add(walk, tokens(300), new=1)
    walk.drain()


def test_a_deadline_counts_what_the_host_has() -> None:
    walk = new_walk(num_sequences=4, host_tokens=1000)
    demoted(walk, tokens(300))
    assert walk.cache.peek(tokens(300)) == 299


def test_equal_fingerprints_are_not_taken_for_equal_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who can make fingerprints collide gets nobody else's KV."""
    monkeypatch.setattr(host_module, "fingerprint", lambda tokens, start: 0)
    monkeypatch.setattr(host_module, "suffixes", lambda tokens, start: [0] * len(tokens))
    walk = new_walk(num_sequences=4, host_tokens=1000)
    demoted(walk, tokens(300, start=1))
    other = add(walk, np.concatenate([[2], tokens(300, start=1)[1:]]), new=2)
    step(walk)
    assert other.reused_tokens == 0
    walk.drain()


def test_the_walk_uses_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = 0
    original = Sequences.load

    def counting(self: Sequences, piece: int, sequence: int, start: int, end: int) -> None:
        nonlocal restored
        restored += end - start
        original(self, piece, sequence, start, end)

    monkeypatch.setattr(Sequences, "load", counting)
    for seed in range(8):
        random_walk(seed, 120, tiered=True)
    assert restored > 1000


Patch = Callable[[pytest.MonkeyPatch], None]


def _start_only(patch: pytest.MonkeyPatch) -> None:
    """A piece is taken for what follows wherever its fingerprint fits, however its tokens go on."""
    patch.setattr(HostTier, "_agreement", lambda self, piece, tokens, proven: min(piece.end, len(tokens)))


def _saved_too_late(patch: pytest.MonkeyPatch) -> None:
    """Cells are saved after they were given up."""
    original = PrefixCache._take_back

    def buggy(self: PrefixCache, evicted: object) -> int:
        if self.sequences is not None:
            self.sequences._ops.sort(key=lambda op: op.kind == "save")
        return original(self, evicted)  # type: ignore[arg-type]

    patch.setattr(PrefixCache, "_take_back", buggy)


def _not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "pin", lambda self, parts, by: None)


def _never_dropped(patch: pytest.MonkeyPatch) -> None:
    """The engine is not told of pieces that are not needed any more."""
    patch.setattr(Sequences, "drop", lambda self, piece: None)


def _wrong_branch(patch: pytest.MonkeyPatch) -> None:
    """Cells are saved from whatever sequence comes first."""
    original = Sequences.save

    def buggy(self: Sequences, piece: int, sequence: int, start: int, end: int) -> None:
        original(self, piece, min(self._holder.values()), start, end)

    patch.setattr(Sequences, "save", buggy)


@pytest.mark.parametrize("plant", [_start_only, _saved_too_late, _not_pinned, _never_dropped, _wrong_branch])
def test_planted_bugs_are_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((RuntimeError, AssertionError, KeyError, StopIteration, IndexError)):
        for seed in range(20):
            random_walk(seed, 150, tiered=True)
