"""The same seed is the same run, to the last bit, whatever the process, its hashes, and who watches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.rig import run, system
from weft.sim.options import Run, parse_faults
from weft.sim.runs import judge_all


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_seed_gives_the_same_decisions(depth: int) -> None:
    first = run(3, 150, "all", serve=system(depth=depth))
    again = run(3, 150, "all", serve=system(depth=depth))
    other = run(4, 150, "all", serve=system(depth=depth))
    assert first.driver.digest() == again.driver.digest()
    assert first.measure.records == again.measure.records
    assert first.driver.digest() != other.driver.digest()


def test_a_digest_shows_what_was_decided() -> None:
    """Another policy decides otherwise; were the digest blind, every test here would pass."""
    digests = {run(1, 200, serve=system(f"scheduler.policy={p}")).driver.digest() for p in ("fcfs", "lpm", "lof")}
    assert len(digests) == 3


def test_checking_and_recording_change_nothing(tmp_path: Path) -> None:
    plain = run(5, 100, "all")
    assert run(5, 100, "all", check="event").driver.digest() == plain.driver.digest()
    assert run(5, 100, "all", record=tmp_path / "trace").driver.digest() == plain.driver.digest()


def _in_a_process(hash_seed: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "WEFT_SCHEDULER__POLICY": "random"}
    command = [sys.executable, "-m", "weft.cli", "simulate", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_with_other_hashes_print_the_same() -> None:
    """Nor does the environment count: the second one sets a policy there, as the first does."""
    arguments = ("--seed", "2", "--requests", "120", "--faults", "all", "--set", "scheduler.overlap=true")
    first = _in_a_process("1", *arguments)
    assert first == _in_a_process("2", *arguments)
    assert "lpm" in first


def test_many_seeds_do_not_depend_on_the_number_of_processes() -> None:
    one = Run(requests=15, faults=parse_faults("all"), vary=True)
    alone = list(judge_all(one, system(), range(6), jobs=1))
    assert alone == list(judge_all(one, system(), range(6), jobs=2))
    assert [v.seed for v in alone] == list(range(6))
    assert not any(v.failure for v in alone)
