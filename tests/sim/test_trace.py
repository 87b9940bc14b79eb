"""The recorder never disturbs the engine, whatever the disk does."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.sim.rig import system
from weft.core.errors import SettingsError
from weft.core.sampling import SamplingParams
from weft.engine import trace
from weft.engine.trace import Add, Recorder, TraceFile, keep_older

PROMPT = np.arange(5, dtype=np.int32)


def _recorder(path: Path, *, patient: bool = False) -> Recorder:
    return Recorder(path, system().header, patient=patient)


def test_events_come_back_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = _recorder(path)
    params = SamplingParams(max_new_tokens=7, logit_bias={3: -1.5}, seed=2**64 - 1, stop=("é\n",), stop_token_ids=(9,))
    recorder.add(1 / 3, 17, PROMPT, params, priority=-2, deadline_s=0.1 + 0.2, session_id="ü", session_ttl_s=4.0)
    recorder.add(0.5, 18, PROMPT[:0], SamplingParams())
    recorder.close()
    first, second = TraceFile(path)
    assert isinstance(first, Add) and isinstance(second, Add)
    assert (first.t, first.deadline, first.session, first.ttl, first.priority) == (1 / 3, 0.1 + 0.2, "ü", 4.0, -2)
    assert first.prompt_ids().tolist() == PROMPT.tolist() and first.sampling() == params
    assert second.prompt_ids().tolist() == [] and second.sampling() == SamplingParams()
    assert TraceFile(path).header == system().header


def test_events_are_on_disk_within_a_second(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path / "trace")
    recorder.expire(1.0)
    deadline = time.monotonic() + 30
    while not list(TraceFile(tmp_path / "trace")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert trace.FLUSH_S < 1
    recorder.close()
    recorder.close()
    recorder.expire(2.0)  # after the end: ignored
    assert len(list(TraceFile(tmp_path / "trace"))) == 1


def test_a_file_that_cannot_be_written_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--record .*No such file"):
        _recorder(tmp_path / "missing" / "trace")


def _full_disk(recorder: Recorder) -> None:
    recorder._file.close()
    recorder._file = open("/dev/full", "wb")  # noqa: SIM115


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = _recorder(tmp_path / "trace")
    _full_disk(recorder)
    with caplog.at_level(logging.ERROR):
        recorder.expire(1.0)
        recorder._flush()
        assert not recorder.recording
        recorder.expire(2.0)
        recorder.close()
    assert [r.getMessage() for r in caplog.records if "has stopped" in r.getMessage()] == [
        f"recording to {tmp_path / 'trace'} has stopped: [Errno 28] No space left on device; the trace ends here"
    ]


def test_a_disk_that_is_too_slow_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is bounded; the engine's thread never waits for the disk."""
    recorder = _recorder(tmp_path / "trace")
    monkeypatch.setattr(trace, "MAX_WAITING_BYTES", 10_000)
    with recorder._write_lock:  # the disk hangs
        for number in range(1000):
            recorder.expire(float(number))
        assert not recorder.recording
        assert not recorder._waiting
    recorder.close()


def test_a_patient_recorder_writes_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _recorder(tmp_path / "trace", patient=True)
    monkeypatch.setattr(trace, "MAX_WAITING_BYTES", 10_000)
    for number in range(1000):
        recorder.expire(float(number))
    recorder.close()
    assert [event.t for event in TraceFile(tmp_path / "trace")] == [float(n) for n in range(1000)]


def test_closing_ends_the_thread(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path / "trace")
    assert any(thread.name == "trace" for thread in threading.enumerate())
    recorder.close()
    assert not any(thread.name == "trace" for thread in threading.enumerate())


def test_an_older_trace_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    keep_older(path)  # there is none
    for text in ("first", "second"):
        path.write_text(text)
        keep_older(path)
    assert not path.exists() and (tmp_path / "trace.1").read_text() == "second"
