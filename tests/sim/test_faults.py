"""Each fault does what it says, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.rig import endings, only, run, system
from weft.scheduler import reserve
from weft.sim.options import Workload

SINGLE_TURNS = Workload(turns=1.0, sessions=0.0)
NO_SESSIONS = Workload(sessions=0.0)


def test_without_faults_everybody_is_served() -> None:
    simulation = run(1, 300, workload=NO_SESSIONS)
    assert endings(simulation) == {"completed": 300}
    assert simulation.driver.scheduler.meters.cached_tokens > 0


def test_sessions_end_with_what_runs_in_them() -> None:
    simulation = run(1, 300, workload=Workload(sessions=1.0))
    assert endings(simulation).keys() == {"completed", "cancelled"}


@pytest.mark.parametrize("depth", [1, 2])
def test_cancel(depth: int) -> None:
    simulation = run(1, 200, only(cancel=0.5), serve=system(depth=depth), workload=NO_SESSIONS)
    found = endings(simulation)
    assert found.keys() == {"completed", "cancelled"} and found["cancelled"] > 40
    lengths = {r.output_tokens for r in simulation.measure.records if r.state.value == "cancelled"}
    assert 0 in lengths and max(lengths) > 3, "cancelled before the first token, and while decoding"


def test_timeout() -> None:
    found = endings(run(1, 200, only(timeout=1.0), workload=Workload(load=3.0, sessions=0.0)))
    assert found["timeout"] > 10
    assert found.keys() <= {"completed", "timeout", "rejected"}


@pytest.mark.parametrize("depth", [1, 2])
def test_crash_fails_whole_steps_and_bad_row_single_requests(depth: int) -> None:
    served = system(depth=depth)
    crashed = run(1, 200, only(crash=0.05), serve=served, workload=NO_SESSIONS)
    bad = run(1, 200, only(bad_row=0.05), serve=served, workload=NO_SESSIONS)
    assert endings(crashed).keys() == endings(bad).keys() == {"completed", "failed"}
    assert endings(crashed)["failed"] > endings(bad)["failed"] > 0


def test_slow_readers_change_no_decision() -> None:
    """Their tokens pile up, no higher than their own answers, while the scheduler goes on as if they were not slow."""
    fast = run(1, 200, workload=SINGLE_TURNS)
    slow = run(1, 200, only(slow_reader=0.5), workload=SINGLE_TURNS)
    assert slow.driver.digest() == fast.driver.digest()
    longest = max(r.output_tokens for r in slow.measure.records)
    assert fast.clients.largest_pile == 0 < slow.clients.largest_pile <= longest


def test_tiny_pool_evicts_and_retracts(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = run(1, 150)
    tiny = run(1, 150, only(tiny_pool=0.1))
    assert tiny.system.header.cache.capacity < roomy.system.header.cache.capacity / 8
    assert tiny.driver.scheduler.cache.counts().evicted_total > 2 * roomy.driver.scheduler.cache.counts().evicted_total
    monkeypatch.setattr(reserve, "MIN_GROWTH", 1)  # admission keeps next to nothing free
    monkeypatch.setattr(reserve, "FLOOR", 0.0)
    retracting = run(1, 150, only(tiny_pool=0.1), workload=Workload(load=4.0, output_tokens=40, open_ended=0.0))
    assert retracting.driver.scheduler.meters.retractions > 20
    assert any(r.retractions for r in retracting.measure.records if r.state.value == "completed")


def test_the_clock_stands_still_at_times() -> None:
    steady = run(1, 150)
    leaping = run(1, 150, only(clock=0.02))
    longest = [float(np.diff(s.measure.samples()["time_s"]).max()) for s in (steady, leaping)]
    assert longest[0] < 10 < longest[1]


def test_flush_forgets_what_nobody_uses() -> None:
    kept, flushed = run(1, 200), run(1, 200, only(flush=0.5))
    cached = [s.driver.scheduler.meters.cached_tokens for s in (kept, flushed)]
    assert 0 <= cached[1] < cached[0] / 2
    assert endings(flushed).get("failed") is None
