"""Helper processes: what they say, and that their end is the end of one clause only."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from weft.core.errors import EngineError
from weft.speech.helper import HelperSynthesizer, MissingPackageError

Start = Callable[..., HelperSynthesizer]
FAKE = str(Path(__file__).with_name("fake_helper.py"))


@pytest.fixture
def start() -> Iterator[Start]:
    helpers = []

    def make(*words: str, keep: bool = False, limit_s: float = 60.0) -> HelperSynthesizer:
        helper = HelperSynthesizer((sys.executable, FAKE, *words), keep=keep, limit_s=limit_s)
        helpers.append(helper)
        return helper

    yield make
    for helper in helpers:
        helper.close()


def say(helper: HelperSynthesizer, text: str) -> np.ndarray:
    return helper.speak(text, "auto", 0.5)


def test_facts_and_sound(start: Start) -> None:
    helper = start()
    assert (helper.facts.name, helper.facts.speeds, helper.facts.clones) == ("obedient", (0.1, 1.0), True)
    assert helper.facts.sample_rate == 24_000  # the helper resamples
    samples = say(helper, "x" * 6000)
    assert samples.dtype == np.float32 and len(samples) == 12_000
    np.testing.assert_allclose(samples[500:-500], 0.5, atol=1e-3)
    assert len(say(helper, "")) == 0
    reference = np.full(500_000, 0.25, np.float32)  # more than a pipe holds
    assert len(helper.speak("x", "auto", 1, reference)) == 1_000_000


def test_it_runs_from_the_first_clause_on(start: Start) -> None:
    helper = start()
    assert helper.pid is None
    say(helper, "x")
    pid = helper.pid
    say(helper, "y")
    assert pid is not None and helper.pid == pid != os.getpid()
    kept = start(keep=True)
    pid = kept.pid
    say(kept, "x")
    assert pid is not None and kept.pid == pid


def test_errors_keep_it(start: Start) -> None:
    helper = start(keep=True)
    pid = helper.pid
    with pytest.raises(EngineError, match="^it will not$") as caught:
        say(helper, "fail")
    assert caught.value.code == "speech_failed"
    with pytest.raises(EngineError, match="^speech failed$"):
        say(helper, "break")
    assert len(say(helper, "ok")) == 4 and helper.pid == pid


def test_a_death_ends_one_clause(start: Start) -> None:
    helper = start(keep=True)
    pid = helper.pid
    with pytest.raises(EngineError, match="the process that speaks died") as caught:
        say(helper, "die")
    assert caught.value.code == "speech_failed"
    assert len(say(helper, "ok")) == 4 and helper.pid not in (None, pid)


def test_killed_while_nobody_speaks(start: Start) -> None:
    helper = start(keep=True)
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    assert len(say(helper, "ok")) == 4


def test_killed_in_the_middle_of_a_clause(start: Start, pipe: Path) -> None:
    helper = start(keep=True)
    with hanging(helper, pipe) as errors:
        assert helper.pid is not None
        os.kill(helper.pid, signal.SIGKILL)
    assert errors == ["the process that speaks died"]
    assert len(say(helper, "ok")) == 4


def test_a_clause_that_does_not_end_is_ended(start: Start) -> None:
    helper = start(limit_s=0.5)
    with pytest.raises(EngineError, match="took longer than 0.5 s and was ended"):
        say(helper, "hang")
    helper._limit_s = 60.0
    assert len(say(helper, "ok")) == 4


def test_several_threads_share_it(start: Start) -> None:
    helper = start()
    lengths: dict[int, list[int]] = {}

    def work(number: int) -> None:
        lengths[number] = [len(say(helper, "x" * number)) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == {number: [2 * number] * 20 for number in range(1, 5)}


def test_closing_ends_a_clause_and_everything_after(start: Start, pipe: Path) -> None:
    helper = start(keep=True)
    pid = helper.pid
    with hanging(helper, pipe) as errors:
        helper.close()
    assert errors == ["the process that speaks died"] and helper.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    with pytest.raises(EngineError, match="shutting down"):
        say(helper, "ok")
    helper.close()


def test_what_keeps_it_from_starting(start: Start) -> None:
    with pytest.raises(MissingPackageError, match="no_such_package"):
        start("missing")
    with pytest.raises(EngineError, match="^ValueError: no good$"):
        start("broken")
    with pytest.raises(EngineError, match="died"):
        start("dead")


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_whoever_started_it(busy: bool, pipe: Path) -> None:
    code = (
        "import sys\n"
        "from weft.speech.helper import HelperSynthesizer\n"
        f"helper = HelperSynthesizer((sys.executable, {FAKE!r}), keep=True)\n"
        "print(helper.pid, flush=True)\n"
        f"helper.speak('hang {pipe}', 'auto', 1.0) if {busy} else sys.stdin.read()\n"
    )
    with subprocess.Popen((sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        ended = os.pidfd_open(int(parent.stdout.readline()))
        if busy:
            pipe.read_bytes()
        parent.kill()
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    assert poll.poll(30_000)
    os.close(ended)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@contextmanager
def hanging(helper: HelperSynthesizer, pipe: Path) -> Iterator[list[str]]:
    """While this lasts, a thread is in a clause that does not end by itself; the error that it gets in the end."""
    errors: list[str] = []

    def hang() -> None:
        with pytest.raises(EngineError) as caught:
            say(helper, f"hang {pipe}")
        errors.append(caught.value.message)

    thread = threading.Thread(target=hang)
    thread.start()
    pipe.read_bytes()
    yield errors
    thread.join()
