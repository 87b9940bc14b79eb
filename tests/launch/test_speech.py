"""Speech with its helper process: from a desk, and in a running server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

import tests.speech.fake_helper as fake_helper
from tests.launch.worker import Worker, children_of, wait_gone
from weft.core.errors import EngineError
from weft.server.speech import AT_ONCE, Desk, Utterance
from weft.speech.helper import HelperSynthesizer
from weft.speech.speaker import Speaker

needs_espeak = pytest.mark.skipif(find_spec("espeakng_loader") is None, reason="needs the extra weft[speech]")
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")

PATH = "/v1/audio/speech"


# ---- a desk ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def helper() -> HelperSynthesizer:
    return HelperSynthesizer((sys.executable, fake_helper.__file__), keep=True)


@pytest.fixture
async def desk(helper: HelperSynthesizer) -> AsyncIterator[Desk]:
    desk = Desk(Speaker(helper, "auto"), "auto")
    yield desk
    await desk.close()


async def rest(utterance: Utterance) -> int:
    count = 0
    while await utterance.next() is not None:
        count += 1
    return count


async def test_a_helper_killed_in_an_utterance_ends_that_one_only(
    desk: Desk, helper: HelperSynthesizer, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    broken, whole = desk.begin(None, None, None), desk.begin(None, None, None)
    broken.push("First sentence.\n\n")
    broken.push(f"hang {tmp_path / 'pipe'}\n\n")
    broken.push("x")
    assert await broken.next() is not None
    await asyncio.to_thread((tmp_path / "pipe").read_bytes)
    whole.push("Another sentence. And one more.")  # waits for the helper
    whole.finish()
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="the process that speaks died"):
        await broken.next()
    assert await rest(whole) == 2
    for utterance in (broken, whole):
        utterance.close()
    assert (desk.used, desk.failures) == (0, 1)


async def test_closing_the_desk_ends_a_clause_that_hangs(desk: Desk, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    utterances = [desk.begin(None, None, None) for _ in range(AT_ONCE)]
    for utterance in utterances:
        utterance.push(f"hang {tmp_path / 'pipe'}\n\nx")
    await asyncio.to_thread((tmp_path / "pipe").read_bytes)
    await desk.close()
    for utterance in utterances:
        with pytest.raises(EngineError):
            await utterance.next()
        utterance.close()
    assert desk.used == 0


# ---- a server ----------------------------------------------------------------------------------------------------


def speaking(worker: Worker) -> int | None:
    """Pid of the process that speaks."""
    for pid in children_of(worker.pid):
        if b"weft.speech.helper" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    return None


@needs_espeak
@needs_proc
def test_a_server_survives_its_speech() -> None:
    with Worker() as worker:
        assert speaking(worker) is None  # nobody has spoken
        for _ in range(2):
            answer = worker.http.post(PATH, json={"input": "Hello there.", "response_format": "pcm"})
            assert answer.status_code == 200 and len(answer.content) > 24_000
            pid = speaking(worker)
            assert pid is not None and "espeak" not in Path(f"/proc/{worker.pid}/maps").read_text()
            os.kill(pid, signal.SIGKILL)
            wait_gone(pid)
        worker.http.post(PATH, json={"input": "Hello."}).raise_for_status()
        pid = speaking(worker)
        worker.terminate()
        assert pid is not None and worker.wait() == 0
        wait_gone(pid)


@needs_espeak
@needs_proc
def test_a_killed_server_takes_its_speech_along() -> None:
    with Worker() as worker:
        worker.http.post(PATH, json={"input": "Hello."}).raise_for_status()
        pid = speaking(worker)
        assert pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        wait_gone(pid)


@needs_espeak
@needs_proc
def test_a_signal_to_all_processes_lets_an_answer_end() -> None:
    with Worker() as worker, worker.http.stream("POST", PATH, json={"input": "This is said. " * 200}) as response:
        parts = response.iter_raw(1000)
        next(parts)
        pid = speaking(worker)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        worker.terminate()
        assert sum(map(len, parts)) > 24_000 * 200
        assert worker.wait() == 0


@pytest.mark.skipif(find_spec("piper") is None, reason="needs the extra weft[piper]")
def test_a_server_with_a_piper_voice(tmp_path: Path) -> None:
    from tests.speech.tiny_voices import HOP, write_voice

    file = write_voice(tmp_path / "tiny.onnx", speakers=2)
    with Worker("--set", f"speech.piper_voice={file}") as worker:
        body = {"input": "abc", "model": "piper", "voice": "speaker1", "response_format": "pcm", "speed": 0.5}
        answer: httpx.Response = worker.http.post(PATH, json=body).raise_for_status()
        assert len(answer.content) // 2 == 2 * HOP * 9 * 24_000 // 16_000
        refused = worker.http.post(PATH, json=body | {"voice": "speaker2"})
        assert refused.status_code == 400 and "Speaker0, Speaker1" in refused.json()["error"]["message"]
