"""`weft simulate`: one seed, many seeds, or a recorded trace. Results go to stdout, timings and failures to stderr."""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from weft.config.resolve import resolve
from weft.core.errors import SettingsError
from weft.engine.trace import Recorder
from weft.sim.options import Faults, Run, Slo, Workload, fill, parse_cost, parse_faults
from weft.sim.picture import draw, run_panels
from weft.sim.replay import Diverged, Replay
from weft.sim.runs import Verdict, joint_digest, judge_all
from weft.sim.simulation import Simulation, SimulationFailed
from weft.sim.summary import Outcome, summary, tables
from weft.sim.system import System, refuse_idle_settings, system_from

DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, before it is understood; None: not given."""

    trace: Path | None = None
    seed: int | None = None
    requests: int | None = None
    seeds: str | None = None
    runs: int | None = None
    jobs: int | None = None
    faults: str | None = None
    vary: bool = False
    check: str | None = None
    workload: Sequence[str] = ()
    cost: Sequence[str] = ()
    slo: Sequence[str] = ()
    config: Path | None = None
    sets: Sequence[str] = ()
    record: Path | None = None
    report: Path | None = None

    def again(self, seed: int) -> str:
        """The command that repeats one seed."""
        words = ["weft", "simulate", "--seed", str(seed), "--requests", str(self.requests or DEFAULT_REQUESTS)]
        single = (("--faults", self.faults), ("--check", self.check), ("--config", self.config))
        words += [word for flag, value in single if value is not None for word in (flag, str(value))]
        words += ["--vary"] if self.vary else []
        many = (("--workload", self.workload), ("--cost", self.cost), ("--slo", self.slo), ("--set", self.sets))
        words += [word for flag, values in many for value in values for word in (flag, value)]
        return shlex.join(words)


@dataclass(slots=True)
class _Timer:
    start_s: float = field(default_factory=time.perf_counter)
    start_cpu_s: float = field(default_factory=time.process_time)

    def tell(self, count: int, what: str) -> None:
        seconds = time.perf_counter() - self.start_s
        cpu_s = time.process_time() - self.start_cpu_s
        print(
            f"{seconds:.3f} s on this machine ({cpu_s:.3f} s of processor time in this process),"
            f" {count / seconds:.0f} {what} a second",
            file=sys.stderr,
        )


def simulate(asked: Asked) -> int:
    """The exit code: 0, or 1 where an invariant did not hold or a replay differed. Raises SettingsError."""
    gc.set_threshold(100_000, 50, 50)  # requests and nodes come and go without cycles; looking for some takes a while
    slo = fill(Slo(), "--slo", asked.slo)
    if asked.trace is not None:
        _refuse_others(asked)
        return _replay(asked.trace, asked.report, slo)
    refuse_idle_settings(list(asked.sets))
    # The environment is left out: the same command must mean the same run everywhere.
    system = system_from(resolve(file=asked.config, sets=asked.sets).settings)
    run = Run(
        seed=asked.seed or 0,
        requests=_positive("--requests", asked.requests, DEFAULT_REQUESTS),
        workload=fill(Workload(), "--workload", asked.workload),
        faults=parse_faults(asked.faults) if asked.faults is not None else Faults(),
        cost=parse_cost(asked.cost),
        slo=slo,
        check="event" if _one_of("--check", asked.check, ("step", "event")) == "event" else "step",
        vary=asked.vary,
    )
    if asked.seeds is None and asked.runs is None:
        if asked.jobs is not None:
            raise SettingsError("--jobs: it needs --seeds or --runs")
        return _run_one(asked, run, system)
    if asked.record is not None or asked.report is not None:
        raise SettingsError("--record and --report: they are for one seed")
    return _run_many(asked, run, system)


# ---- one seed ----------------------------------------------------------------------------------------------------


def _run_one(asked: Asked, run: Run, system: System) -> int:
    timer = _Timer()
    record = partial(_recorder, asked.record) if asked.record is not None else None
    simulation = Simulation(run, system, record)
    try:
        simulation.execute()
    except SimulationFailed as error:
        traceback.print_exception(error.__cause__, file=sys.stderr)
        _tell_failure(str(error), asked.again(run.seed))
        return 1
    outcome = outcome_of(simulation)
    print(summary(outcome))
    if asked.report is not None:
        _report(asked.report, outcome)
    timer.tell(run.requests, "requests")
    return 0


def _recorder(path: Path, system: System) -> Recorder:
    return Recorder(path, system.header, patient=True)


def outcome_of(simulation: Simulation) -> Outcome:
    """What the summary needs of a finished simulation."""
    run = simulation.run
    title = f"seed {run.seed}, {run.requests} requests, faults {run.faults}{', varied' if run.vary else ''}"
    piles = ()
    if run.faults.slow_reader:
        piles = (("readers", f"at most {simulation.clients.largest_pile} tokens waited for one slow reader"),)
    return Outcome(
        title=title,
        header=simulation.system.header,
        measure=simulation.measure,
        scheduler=simulation.driver.scheduler,
        slo=run.slo,
        end_s=simulation.end_s,
        evicted_tokens=simulation.evicted_tokens,
        digest=simulation.driver.digest(),
        extra=piles,
    )


def _report(path: Path, outcome: Outcome) -> None:
    print()
    print(tables(outcome))
    samples = outcome.measure.samples()
    subtitle = f"{outcome.measure.steps} steps, digest {outcome.digest}"
    picture = draw(f"weft simulate: {outcome.title}", subtitle, samples["time_s"], run_panels(samples))
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--report {path}: {error.strerror}") from error


# ---- many seeds --------------------------------------------------------------------------------------------------


def _run_many(asked: Asked, run: Run, system: System) -> int:
    timer = _Timer()
    seeds = _seeds(asked, run.seed)
    jobs = _positive("--jobs", asked.jobs, os.cpu_count() or 1)
    verdicts: list[Verdict] = []
    for verdict in judge_all(run, system, seeds, jobs):
        verdicts.append(verdict)
        if verdict.failure is not None:
            _tell_failure(verdict.failure, asked.again(verdict.seed))
    failed = [v.seed for v in verdicts if v.failure is not None]
    total = {name: sum(getattr(v, name) for v in verdicts) for name in ("requests", "steps", "tokens", "retractions")}
    what = f"{len(seeds)} runs, faults {run.faults}{', varied' if run.vary else ''}"
    print(f"seeds       {seeds[0]} to {seeds[-1]}: {what}")
    print(f"checked     {total['steps']} steps, {total['requests']} requests, {total['tokens']} tokens")
    print(f"pressure    {total['retractions']} retractions")
    print(f"failed      {', '.join(map(str, failed)) if failed else 'none'}")
    print(f"digest      {joint_digest(verdicts)}")
    timer.tell(total["requests"], "requests")
    return 1 if failed else 0


def _seeds(asked: Asked, first: int) -> range:
    if asked.seeds is not None:
        if asked.runs is not None or asked.seed is not None:
            raise SettingsError("--seeds: it goes with neither --seed nor --runs")
        match = re.fullmatch(r"(\d+)\.\.(\d+)", asked.seeds)
        if match is None or int(match[2]) < int(match[1]):
            raise SettingsError(f"--seeds {asked.seeds}: must be FIRST..LAST")
        return range(int(match[1]), int(match[2]) + 1)
    return range(first, first + _positive("--runs", asked.runs, 1))


# ---- a trace -----------------------------------------------------------------------------------------------------


def _replay(path: Path, report: Path | None, slo: Slo) -> int:
    timer = _Timer()
    replay = Replay(path)
    try:
        replay.execute()
    except Diverged as error:
        print(f"weft: {path}: the replay differs: {error}", file=sys.stderr)
        return 1
    extra = [("replay", f"{replay.events} events, every decision as recorded")]
    if replay.torn:
        extra.append(("trace", "its last line was cut short and left out"))
    outcome = Outcome(
        title=f"trace of {replay.header.note or 'an engine'}, weft {replay.header.weft}",
        header=replay.header,
        measure=replay.measure,
        scheduler=replay.driver.scheduler,
        slo=slo,
        end_s=replay.driver.now_s - replay.start_s,
        evicted_tokens=replay.driver.scheduler.cache.evicted_total,
        digest=replay.driver.digest(),
        extra=tuple(extra),
    )
    print(summary(outcome))
    if report is not None:
        _report(report, outcome)
    timer.tell(replay.events, "events")
    return 0


def _refuse_others(asked: Asked) -> None:
    """Options that mean nothing to a replay."""
    for name in ("seed", "requests", "seeds", "runs", "jobs", "faults", "check", "config", "record"):
        if getattr(asked, name) is not None:
            raise SettingsError(f"--{name}: a trace is replayed as it is")
    for name in ("vary", "workload", "cost", "sets"):
        if getattr(asked, name):
            raise SettingsError(f"--{name.removesuffix('s')}: a trace is replayed as it is")


# ---- words -------------------------------------------------------------------------------------------------------


def _tell_failure(failure: str, again: str) -> None:
    print(f"weft: the simulation failed: {failure}", file=sys.stderr)
    print(f"again with: {again}", file=sys.stderr)


def _positive(flag: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise SettingsError(f"{flag} {value}: must be at least 1")
    return default if value is None else value


def _one_of(flag: str, value: str | None, allowed: Iterable[str]) -> str | None:
    if value is not None and value not in allowed:
        raise SettingsError(f"{flag} {value}: must be one of {', '.join(allowed)}")
    return value
