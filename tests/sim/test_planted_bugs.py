"""The simulator must be able to fail: each bug planted here, of the kinds that public servers had, is caught."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.sim.rig import run, system
from weft.core.request import Ending, Request
from weft.kv.prefix_cache import PrefixCache
from weft.kv.radix_tree import Node, RadixTree
from weft.scheduler import planner, roster
from weft.scheduler.admission import Admission
from weft.scheduler.scheduler import Scheduler, Update
from weft.sim.options import COSTS, Workload
from weft.sim.simulation import SimulationFailed

Patch = Callable[[pytest.MonkeyPatch], None]


def _double_release(patch: pytest.MonkeyPatch) -> None:
    """A finished request frees its own slots, and then once more."""
    original = PrefixCache.cache_finished

    def buggy(self: PrefixCache, request: Request, **options: Any) -> None:
        row, prefix = request.row, request.prefix
        slots = (
            self.rows.table[row, prefix.length : request.allocated_len].copy() if row >= 0 else np.empty(0, np.int32)
        )
        original(self, request, **options)
        self.pages.free(slots)

    patch.setattr(PrefixCache, "cache_finished", buggy)


def _leaking_lock(patch: pytest.MonkeyPatch) -> None:
    """Every tenth unlock is forgotten."""
    original, calls = RadixTree.unlock, [0]

    def buggy(self: RadixTree, node: Node, **options: Any) -> None:
        calls[0] += 1
        if calls[0] % 10:
            original(self, node, **options)

    patch.setattr(RadixTree, "unlock", buggy)


def _lost_ending(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.take_updates

    def buggy(self: Scheduler) -> list[Update]:
        return [u for u in original(self) if u.ending is None or u.request.request_id % 20]

    patch.setattr(Scheduler, "take_updates", buggy)


def _second_ending(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.take_updates

    def buggy(self: Scheduler) -> list[Update]:
        updates = original(self)
        return updates + [Update(u.request, ending=u.ending) for u in updates if u.ending is not None]

    patch.setattr(Scheduler, "take_updates", buggy)


def _deadlines_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roster, "overdue", lambda *_: None)


def _one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    original = Admission.max_device_len

    def buggy(self: Admission, *arguments: Any) -> int:
        return original(self, *arguments) + 1

    patch.setattr(Admission, "max_device_len", buggy)


def _stale_draw(patch: pytest.MonkeyPatch) -> None:
    """The number of the draw is read from what has landed, not from what is in flight."""
    original = planner._sampling_row

    def buggy(index: int, request: Request, *more: Any) -> Any:
        row = original(index, request, *more)
        row.output_index = request.output_len
        return row

    patch.setattr(planner, "_sampling_row", buggy)


def _early_release(patch: pytest.MonkeyPatch) -> None:
    """A request that ends gives its slots back although a step with it is in flight."""
    original = Scheduler._end

    def buggy(self: Scheduler, request: Request, ending: Ending, *more: Any, **options: Any) -> None:
        original(self, request, ending, *more, **options)
        self.cache.cache_finished(request)

    patch.setattr(Scheduler, "_end", buggy)


def _wrong_slots(patch: pytest.MonkeyPatch) -> None:
    """A shared prefix is handed out with two slots swapped, and no check looks."""
    original = PrefixCache.attach

    def buggy(self: PrefixCache, request: Request, **options: Any) -> None:
        original(self, request, **options)
        if request.prefix.length > 2:
            self.rows.table[request.row, 1] = self.rows.table[request.row, 2]

    patch.setattr(PrefixCache, "attach", buggy)
    patch.setattr(Scheduler, "check", lambda self: None)


def _deaf_to_stop_strings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "complete", lambda self, request_id: self.find(request_id) is not None)


def _deaf_to_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "abort", lambda self, request_id, since_s=None: self.find(request_id) is not None)


def _idle_with_work(patch: pytest.MonkeyPatch) -> None:
    """Nobody is admitted once the queue was long."""
    original = Scheduler.plan

    def buggy(self: Scheduler) -> Any:
        return None if self.steps > 30 else original(self)

    patch.setattr(Scheduler, "plan", buggy)


def _keys_without_adapter(patch: pytest.MonkeyPatch) -> None:
    """What one adapter has computed is found by another."""
    patch.setattr(Request, "keys", lambda self, start, end: self._tokens[start:end])


BUGS: list[tuple[Patch, str, int]] = [
    (_double_release, "none", 1),
    (_leaking_lock, "none", 1),
    (_lost_ending, "none", 1),
    (_second_ending, "none", 1),
    (_deadlines_ignored, "timeout", 1),
    (_one_token_too_many, "none", 1),
    (_stale_draw, "none", 2),
    (_early_release, "cancel", 2),
    (_wrong_slots, "none", 1),
    (_deaf_to_stop_strings, "none", 1),
    (_deaf_to_aborts, "cancel", 1),
    (_idle_with_work, "none", 1),
    (_keys_without_adapter, "none", 1),
]


@pytest.mark.parametrize(("plant", "faults", "depth"), BUGS, ids=[bug.__name__.strip("_") for bug, _, _ in BUGS])
def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch, plant: Patch, faults: str, depth: int) -> None:
    served = system("http.max_concurrent_requests=4", depth=depth, adapters=2)
    workload = Workload(load=10.0, output_tokens=20)
    again = partial(run, 1, 80, faults, serve=served, workload=workload, cost=COSTS["cpu"])  # slow: deadlines pass
    again()  # without the bug all is well
    plant(monkeypatch)
    with pytest.raises(SimulationFailed, match=r"^seed 1, step \d+, "):
        again()


def test_a_failure_comes_back_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            _leaking_lock(patch)
            with pytest.raises(SimulationFailed) as caught:
                run(1, 80)
            texts.append(str(caught.value))
    assert texts[0] == texts[1]
