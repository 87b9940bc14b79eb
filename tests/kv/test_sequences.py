"""Sequences over the radix tree: who holds what, and what the engine is told to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.property.walk import random_walk
from tests.scheduler.rig import add, new_walk, step, steps_until_done, tokens
from weft.core.errors import InvariantError
from weft.core.plan import TO_THE_END, KvOp
from weft.core.request import RequestState
from weft.kv.sequences import SequencePool, Sequences


def test_ids_are_never_handed_out_twice_nor_given_back_twice() -> None:
    walk = new_walk()
    first, second = add(walk, tokens(4)), add(walk, tokens(4, start=2))
    pool = SequencePool(1)
    assert pool.allocate(first) == 0 and pool.free == 0
    with pytest.raises(InvariantError, match="no free sequence"):
        pool.allocate(second)
    with pytest.raises(InvariantError, match="bound already"):
        pool.adopt(second, 0)
    assert pool.leave(first) == 0
    pool.give_back(0)
    with pytest.raises(InvariantError, match="free already"):
        pool.give_back(0)
    with pytest.raises(InvariantError, match="has no sequence"):
        pool.of(first)


def test_a_conversation_goes_on_in_the_sequence_that_holds_it() -> None:
    walk = new_walk(num_sequences=1)
    prompt = tokens(20)
    request = add(walk, prompt, new=3)
    steps_until_done(walk)
    answer = request.tokens
    longer = add(walk, np.concatenate([answer, tokens(9, start=5)]), new=2)
    plan = walk.begin_step()
    assert plan is not None and plan.sequences is not None and plan.sequences.tolist() == [0]
    assert not plan.kv_ops or all(op.start >= longer.prefix.length for op in plan.kv_ops), "nothing is copied or lost"
    assert longer.cached_len == 22
    walk.end_step()
    walk.drain()


def test_a_branch_is_shared_wherever_it_leaves() -> None:
    walk = new_walk(num_sequences=4)
    trunk = tokens(30)
    add(walk, np.concatenate([trunk, tokens(10, start=2)]), new=2)
    steps_until_done(walk)
    add(walk, np.concatenate([trunk, tokens(10, start=3)]), new=2)
    plan = step(walk)
    (copy,) = [op for op in plan.kv_ops if op.kind == "copy"]
    assert (copy.start, copy.end) == (0, 30)
    assert plan.num_tokens == 10
    walk.drain()


def test_whoever_computed_the_same_takes_over_the_cells_of_the_first() -> None:
    walk = new_walk(num_sequences=4)
    short = tokens(14)
    add(walk, short, new=2)
    add(walk, short, new=2)  # shares too little to wait for the first
    plan = step(walk)
    assert plan.num_rows == 2
    while walk.scheduler.has_work:
        assert walk.turn()
    assert walk.backend.cells is not None
    walk.backend.cells.do(walk.cache.take_ops())
    assert walk.backend.cells.used == walk.cache.counts().cached


def test_without_a_free_id_requests_wait_and_nobody_fails() -> None:
    walk = new_walk(num_sequences=2)
    requests = [add(walk, tokens(12, start=n), new=5) for n in range(1, 11)]
    step(walk)
    states = [request.state for request in requests]
    assert states.count(RequestState.PROCESSING) == 2 and states.count(RequestState.PENDING) == 8
    walk.drain()
    assert all(request.state is RequestState.COMPLETED for request in requests)


def test_a_cached_branch_gives_its_id_to_whoever_needs_one() -> None:
    walk = new_walk(num_sequences=2)
    for start in (1, 2):
        add(walk, tokens(10, start=start), new=1)
        steps_until_done(walk)
    assert walk.cache.counts().cached == 20
    add(walk, tokens(10, start=3), new=1)
    plan = step(walk)
    assert KvOp("remove", 0, 0, TO_THE_END) in plan.kv_ops  # the one that was not used for longest
    assert walk.cache.evicted_total == 10
    walk.drain()


def test_what_is_cut_from_a_leaf_leaves_its_sequence() -> None:
    walk = new_walk(num_sequences=2, chunked_prefill_size=600)
    add(walk, tokens(600), new=1)
    steps_until_done(walk)
    walk.cache.evict(1)
    assert walk.cache.take_ops()[-1] == KvOp("remove", 0, 600 - 256, TO_THE_END)
    walk.drain()


def test_a_spare_holder_is_found_beside_a_request_that_ends_there() -> None:
    walk = new_walk(num_sequences=2)
    prompt = tokens(40)
    add(walk, prompt, new=1)
    steps_until_done(walk)
    first = add(walk, prompt[:20], new=30)  # leaves within the edge, and so needs an id of its own
    step(walk)
    walk.cache.evict(21)  # the branch below is gone; its sequence now holds what the request stands on
    second = add(walk, tokens(10, start=7), new=1)
    step(walk)
    assert first.state is RequestState.PROCESSING and second.state is not RequestState.PENDING
    walk.drain()


def test_sequences_need_pages_of_one_token() -> None:
    walk = new_walk(page_size=16)
    with pytest.raises(ValueError, match="pages of one token"):
        Sequences(walk.cache.tree, 4)


def test_reset_drops_every_cell() -> None:
    walk = new_walk(num_sequences=3)
    add(walk, tokens(10), new=1)
    steps_until_done(walk)
    walk.cache.reset()
    assert walk.backend.cells is not None
    walk.backend.cells.do(walk.cache.take_ops())
    assert not walk.backend.cells.used
    add(walk, tokens(10), new=1)
    walk.drain()


Patch = Callable[[pytest.MonkeyPatch], None]


def _no_takeover(patch: pytest.MonkeyPatch) -> None:
    """The cells of the faster request are not taken over, though the tree counts them once."""
    original = Sequences.inserted

    def buggy(self: Sequences, request: object, start: int, match: object, end: int) -> None:
        before = len(self._ops)
        original(self, request, start, match, end)  # type: ignore[arg-type]
        del self._ops[before:]

    patch.setattr(Sequences, "inserted", buggy)


def _id_before_its_cells(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequences, "_free", lambda self, sequence: self.pool.give_back(sequence))


def _tail_kept(patch: pytest.MonkeyPatch) -> None:
    """What lies beyond a leaf stays in the sequence that holds it."""
    patch.setattr(Sequences, "_shorten", lambda self, sequence, end: self._covers.__setitem__(sequence, end))


def _holder_lost(patch: pytest.MonkeyPatch) -> None:
    """A leaf that was continued keeps no sequence, nor does what continues it."""
    patch.setattr(Sequences, "_hold", lambda self, sequence, node: None)


@pytest.mark.parametrize("plant", [_no_takeover, _id_before_its_cells, _tail_kept, _holder_lost])
def test_planted_bugs_are_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((RuntimeError, AssertionError, KeyError, StopIteration)):
        for seed in range(30):
            random_walk(seed, 120)
