"""Short words for what simulator tests do again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weft.config.resolve import resolve
from weft.engine.trace import Recorder
from weft.sim.options import Faults, Run, Workload, parse_faults
from weft.sim.simulation import Simulation
from weft.sim.system import System, system_from


def system(*sets: str, depth: int = 1, adapters: int = 0) -> System:
    """The default system, but for some settings."""
    found = system_from(resolve(sets=sets).settings)
    model = msgspec.structs.replace(found.header.model, adapters=adapters)
    return System(msgspec.structs.replace(found.header, depth=depth, model=model), found.tick_s)


def run(
    seed: int = 1,
    requests: int = 60,
    faults: str = "none",
    *,
    serve: System | None = None,
    record: Path | None = None,
    workload: Workload | None = None,
    **more: Any,
) -> Simulation:
    """A finished simulation; raises SimulationFailed."""
    asked = Run(seed=seed, requests=requests, faults=parse_faults(faults), workload=workload or Workload(), **more)
    recorder = None if record is None else lambda s: Recorder(record, s.header, patient=True)
    simulation = Simulation(asked, serve or system(), recorder)
    simulation.execute()
    return simulation


def only(**shares: float) -> str:
    """Faults with these shares and no others."""
    return str(Faults(**shares))


def endings(simulation: Simulation) -> dict[str, int]:
    return {name: count for name, count in simulation.driver.scheduler.meters.finished.items() if count}
