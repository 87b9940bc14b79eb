"""`weft simulate` from the outside: output, exit codes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli import app
from weft.scheduler.scheduler import Scheduler


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_one_seed_with_everything(tmp_path: Path) -> None:
    trace, picture, again = tmp_path / "trace", tmp_path / "run.svg", tmp_path / "again.svg"
    arguments = ("--seed", "3", "--requests", "60", "--faults", "cancel=0.5,slow-reader", "--cost", "cpu,host=0.001")
    first = simulate(*arguments, "--record", str(trace), "--report", str(picture))
    assert first.exit_code == 0, first.output
    assert "faults cancel=0.5,slow-reader=0.1" in first.stdout and "hit rate" in first.stdout
    assert "requests a second" in first.stderr and "second" not in first.stdout
    assert simulate(*arguments).stdout == first.stdout.partition("\n\n")[0] + "\n"
    replayed = simulate(str(trace), "--report", str(again))
    assert replayed.exit_code == 0, replayed.output
    same = ("endings", "tokens", "ttft", "itl", "pressure", "digest")
    for line in first.stdout.splitlines():
        if line.startswith(same):
            assert line in replayed.stdout
    assert picture.read_text().count("<path") > 10 and again.exists()


def test_a_replay_that_differs_exits_1(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    simulate("--requests", "20", "--record", str(trace))
    trace.write_text(trace.read_text().replace('"slots":"', '"slots":"x', 1))
    result = simulate(str(trace))
    assert result.exit_code == 1 and "the replay differs: step 1, " in result.stderr
    assert "slots" in result.stderr and not result.stdout


def test_many_seeds() -> None:
    result = simulate("--seeds", "4..6", "--requests", "20", "--faults", "all", "--vary", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "seeds       4 to 6: 3 runs" in result.stdout and "60 requests" in result.stdout
    same = simulate("--seed", "4", "--runs", "3", "--requests", "20", "--faults", "all", "--vary", "--jobs", "1")
    assert same.stdout == result.stdout


def test_a_failure_names_seed_step_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.check

    def failing(self: Scheduler) -> None:
        if self.steps > 20:
            raise RuntimeError("a planted bug")
        original(self)

    monkeypatch.setattr(Scheduler, "check", failing)
    command = (
        "weft simulate --seed 7 --requests 30 --faults cancel --vary --workload load=2 --set scheduler.policy=fcfs"
    )
    arguments = command.split()[2:]
    for result in (simulate(*arguments), simulate("--seeds", "7..7", "--jobs", "1", *arguments[2:])):
        assert result.exit_code == 1
        assert "seed 7, step " in result.stderr and "a planted bug" in result.stderr
        assert f"again with: {command}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--set", "http.port=1"), "http.port: it means nothing to a simulation"),
        (("--set", "scheduler.polcy=lpm"), "unknown setting scheduler.polcy"),
        (("--faults", "flood"), "unknown name 'flood'; names are cancel, timeout"),
        (("--faults", "cancel=2"), "cancel: 2 is no share"),
        (("--faults", "cancel=x"), "cancel: 'x' is not a number"),
        (("--workload", "arrivals=never"), "arrivals: 'never' is not allowed"),
        (("--workload", "rate"), "must be name=value"),
        (("--cost", "tpu"), "must be name=value; names are step"),
        (("--cost", "step=0"), "step: it must be above 0"),
        (("--seeds", "5..3"), "must be FIRST..LAST"),
        (("--seeds", "1..3", "--seed", "1"), "goes with neither"),
        (("--requests", "0"), "--requests 0: must be at least 1"),
        (("--jobs", "2"), "--jobs: it needs --seeds or --runs"),
        (("--runs", "2", "--report", "x.svg"), "are for one seed"),
        (("--check", "never"), "must be one of step, event"),
        (("trace", "--seed", "1"), "--seed: a trace is replayed as it is"),
        (("trace", "--vary"), "--vary: a trace is replayed as it is"),
    ],
)
def test_what_means_nothing_is_refused(arguments: tuple[str, ...], told: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_no_trace_exits_1(tmp_path: Path) -> None:
    result = simulate(str(tmp_path / "missing"))
    assert result.exit_code == 1 and "No such file" in result.stderr
