"""Many seeds, in several processes; the report does not depend on how many."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from weft.sim.options import Run
from weft.sim.simulation import Simulation, SimulationFailed
from weft.sim.system import System


@dataclass(frozen=True, slots=True)
class Verdict:
    """One seed's run; `failure` is None where all went well."""

    seed: int
    requests: int
    steps: int
    events: int
    tokens: int
    retractions: int
    digest: str
    failure: str | None


def judge(run: Run, system: System) -> Verdict:
    """Runs one seed; a failure is a verdict, not an exception."""
    simulation = Simulation(run, system)
    failure = None
    try:
        simulation.execute()
    except SimulationFailed as error:
        failure = str(error)
    meters = simulation.driver.scheduler.meters
    return Verdict(
        seed=run.seed,
        requests=simulation.clients.sent,
        steps=simulation.measure.steps,
        events=simulation.events,
        tokens=meters.generation_tokens,
        retractions=meters.retractions,
        digest=simulation.driver.digest(),
        failure=failure,
    )


def judge_all(run: Run, system: System, seeds: Sequence[int], jobs: int) -> Iterator[Verdict]:
    """The verdicts in the order of the seeds."""
    runs = [replace(run, seed=seed) for seed in seeds]
    if jobs <= 1 or len(runs) == 1:
        for one in runs:
            yield judge(one, system)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judge, runs, [system] * len(runs), chunksize=max(1, min(32, len(runs) // (4 * jobs))))


def joint_digest(verdicts: Sequence[Verdict]) -> str:
    """One digest over all runs."""
    digest = hashlib.blake2b(digest_size=16)
    for verdict in verdicts:
        digest.update(f"{verdict.seed} {verdict.digest}\n".encode())
    return digest.hexdigest()
