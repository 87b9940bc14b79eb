"""Some hundred seeds: random systems, workloads and faults, every invariant proven after every step."""

from __future__ import annotations

import pytest

from tests.sim.rig import run, system

SEEDS_IN_A_TEST = 20


@pytest.mark.parametrize("first", range(0, 240, SEEDS_IN_A_TEST))
def test_seeds(first: int) -> None:
    faults = ("all", "cancel,bad-row,flush", "timeout,crash,slow-reader", "none")[first // SEEDS_IN_A_TEST % 4]
    check = "event" if first % 80 == 0 else "step"
    for seed in range(first, first + SEEDS_IN_A_TEST):
        run(seed, 20, faults, vary=True, check=check)


def test_a_longer_run_with_everything() -> None:
    simulation = run(7, 800, "all", serve=system("scheduler.overlap=true", "scheduler.priority=true"))
    assert simulation.clients.sent == 800
    assert len(simulation.measure.records) + sum(simulation.measure.refused.values()) == 800
