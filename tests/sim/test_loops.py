"""The plain and the overlapped loop give every request the same tokens."""

from __future__ import annotations

import pytest

from tests.sim.rig import only, run, system
from weft.scheduler.scheduler import Scheduler, Update
from weft.sim.options import Workload
from weft.sim.simulation import Simulation

Outputs = dict[int, tuple[str, list[int]]]


def _outputs(monkeypatch: pytest.MonkeyPatch, depth: int, faults: str, *sets: str) -> tuple[Simulation, Outputs]:
    """The run, and state and tokens of every request."""
    tokens: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    original = Scheduler.take_updates

    def listening(self: Scheduler) -> list[Update]:
        updates = original(self)
        for update in updates:
            tokens.setdefault(update.request.request_id, []).extend(update.tokens)
            if update.ending is not None:
                states[update.request.request_id] = update.ending.state.value
        return updates

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "take_updates", listening)
        workload = Workload(turns=1.0, sessions=0.0)
        simulation = run(11, 150, faults, serve=system(*sets, depth=depth), workload=workload)
    return simulation, {request_id: (states[request_id], tokens[request_id]) for request_id in sorted(tokens)}


def _compare(plain: tuple[Simulation, Outputs], overlapped: tuple[Simulation, Outputs]) -> None:
    """How much comes after a stop string, until the engine hears of it, depends on the loop; nothing else does."""
    by_stop_string = plain[0].witness.completed
    assert len(plain[1]) == 150 > len(by_stop_string)
    for request_id, (state, tokens) in plain[1].items():
        other_state, other_tokens = overlapped[1][request_id]
        if request_id in by_stop_string:
            shorter = min(len(tokens), len(other_tokens))
            tokens, other_tokens = tokens[:shorter], other_tokens[:shorter]
        assert (other_state, other_tokens) == (state, tokens)


@pytest.mark.parametrize("sets", [(), ("kv_cache.max_items=1024", "kv_cache.page_size=16"), ("scheduler.mixed=false",)])
def test_both_loops_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]) -> None:
    _compare(_outputs(monkeypatch, 1, "none", *sets), _outputs(monkeypatch, 2, "none", *sets))


def test_both_loops_give_the_same_tokens_in_a_pool_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = only(tiny_pool=0.1)
    _compare(_outputs(monkeypatch, 1, faults), _outputs(monkeypatch, 2, faults))


def test_overlap_hides_the_host() -> None:
    """The same work, but the device does not wait for planning."""
    ends = [run(1, 300, serve=system(depth=depth), workload=Workload(load=5.0)).end_s for depth in (1, 2)]
    assert ends[1] <= ends[0]
