"""A recorded run replays to the same decisions, and any other decision is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import fake_settings
from tests.sim.rig import run, system
from weft.core.errors import EngineError
from weft.engine.llm import LLM
from weft.engine.trace import TraceError
from weft.scheduler.waiting import WaitingLine
from weft.sim.options import Workload
from weft.sim.replay import Diverged, Replay


def _replayed(path: Path) -> Replay:
    replay = Replay(path)
    replay.execute()
    return replay


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("vary", [False, True])
def test_simulate_record_replay(tmp_path: Path, depth: int, vary: bool) -> None:
    path = tmp_path / "trace"
    for seed in range(1, 5):
        simulation = run(seed, 60, "all", serve=system(depth=depth, adapters=2), vary=vary, record=path)
        replay = _replayed(path)
        assert replay.driver.digest() == simulation.driver.digest()
        assert replay.measure.records == simulation.measure.records
        assert replay.measure.refused == simulation.measure.refused
        assert not replay.torn


def test_a_trace_tells_whose_adapter_a_request_and_a_step_have(tmp_path: Path) -> None:
    run(1, 60, record=tmp_path / "trace", serve=system(adapters=2))
    lines = _lines(tmp_path / "trace")
    asked = {line["id"]: line.get("adapter", 0) for line in lines if line["e"] == "add"}
    assert {*asked.values()} == {0, 1, 2}
    for line in lines:
        if line["e"] == "plan" and "ids" in line:
            assert {asked[request_id] for request_id in line["ids"]} == {line.get("adapter", 0)}


def test_the_same_run_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(2, 60, "all", record=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _tampered(tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A trace in which one event of this kind, well inside, was changed."""
    path = tmp_path / "trace"
    crowded = system("http.max_queue_size=2", "http.max_concurrent_requests=2")
    run(3, 60, "cancel", record=path, serve=crowded, workload=Workload(load=10.0))
    lines = _lines(path)
    places = [i for i, line in enumerate(lines) if line["e"] == kind and (kind != "plan" or "ids" in line)]
    change(lines[places[len(places) // 2]])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _set(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update(changes)


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("plan", _set(slots="0123456789abcdef"), "another plan; slots: 0123456789abcdef in the trace"),
        ("plan", _set(ids=[99999]), r"another plan; .*ids: \[99999\] in the trace"),
        ("plan", _set(mode="mixed "), "another plan; mode: mixed  in the trace"),
        ("end", _set(reason="tea"), "another ending; reason: tea in the trace"),
        ("end", _set(tokens=12345), "another ending; tokens: 12345 in the trace"),
        ("refused", _set(code="other"), "another refusal; code: other in the trace"),
        ("add", _set(prompt="ZAAAAA=="), "another plan; .*lens"),
        ("apply", _set(step=99999), "step 99999 was not planned"),
    ],
)
def test_a_changed_decision_is_found(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    with pytest.raises(Diverged, match=rf"^step \d+, event \d+, .* s: .*({told})"):
        _replayed(_tampered(tmp_path, kind, change))


def test_another_scheduler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    run(3, 120, record=path, serve=system("scheduler.max_batch_size=2"))
    original = WaitingLine.ordered
    monkeypatch.setattr(WaitingLine, "ordered", lambda self: iter(list(original(self))[::-1]))
    with pytest.raises(Diverged, match="another plan"):
        _replayed(path)


def test_an_ending_that_is_missing_or_too_much_is_found(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run(3, 30, record=path)
    lines = path.read_text().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if '"e":"end"' in line]
    path.write_text("".join(lines[: ends[-1]] + lines[ends[-1] + 1 :]))
    with pytest.raises(Diverged, match="at the end: .*which the trace does not have"):
        _replayed(path)
    path.write_text("".join([*lines, lines[ends[-1]]]))
    with pytest.raises(Diverged, match="no such ending"):
        _replayed(path)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run(3, 30, record=path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert _replayed(path).torn
    middle = whole.index(b'{"e":"plan"')
    path.write_bytes(whole[:middle] + b"%" + whole[middle + 1 :])
    with pytest.raises(TraceError, match=r"trace, line \d+"):
        _replayed(path)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with pytest.raises(TraceError, match="No such file"):
        Replay(path)
    path.write_text('{"hello": 1}\n')
    with pytest.raises(TraceError, match="not a trace"):
        Replay(path)
    run(3, 10, record=path)
    path.write_text(path.read_text().replace('"version":1', '"version":7', 1))
    with pytest.raises(TraceError, match="version 7"):
        Replay(path)


def test_a_run_of_an_embedding_model_replays(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    sets = ("backend.fake.embeddings=4", "backend.fake.faults={nan_on_token: 7}", f"engine.record={path}")
    with LLM(settings=fake_settings(*sets)) as llm:
        llm.embed([[1, 2, 3], [4]] * 50)
        with pytest.raises(EngineError):
            llm.embed([[1], [7]])
    replay = _replayed(path)
    assert not replay.torn and replay.driver.scheduler.meters.finished["completed"] >= 100
    assert replay.driver.scheduler.meters.finished["failed"] == 1
