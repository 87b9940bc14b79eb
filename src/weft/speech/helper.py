"""A synthesizer in a process of its own: native code that crashes or hangs ends one clause, not the server.

The API process, where `HelperSynthesizer` lives, neither loads what speaks nor shares Python's lock with it. The helper
says one clause at a time. It is started by the first clause, again after it died, and killed when a clause takes longer
than its limit. It ends when its input closes, whatever it does just then, so none outlives the process that started it.
`python -m weft.speech.helper ENGINE [FILE]` is a helper.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from weft.core.errors import EngineError
from weft.core.plan import Float32s
from weft.media.resample import resampled
from weft.speech.base import SAMPLE_RATE, Facts, Synthesizer

logger = logging.getLogger(__name__)

CLAUSE_S = 20.0
"""A clause has at most 200 characters; one that takes longer than this will not end."""

START_S = 60.0
"""To load a voice."""

NICENESS = 10  # text comes first

_LENGTH = struct.Struct("!Q")  # in front of each message, a pickled value: they come from our own process

_FACTS, _MISSING, _SOUND, _FAILED = "facts", "missing", "sound", "failed"


class MissingPackageError(Exception):
    """What the engine needs is not installed."""


class HelperSynthesizer:
    """Speaks through a helper process."""

    def __init__(self, command: Sequence[str], *, keep: bool, limit_s: float = CLAUSE_S) -> None:
        """Starts a helper to learn what it can do.

        `command`: starts a helper; see `helper_command`. `keep`: it stays for the first clause, because starting
        takes long. Raises MissingPackageError, and EngineError when it does not start.
        """
        self._command = tuple(command)
        self._limit_s = limit_s
        self._lock = threading.Lock()  # held while a clause is said
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.facts = self._start()
        if not keep:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the helper, where there is one."""
        process = self._process
        return None if process is None else process.pid

    def speak(self, text: str, voice: str, speed: float, reference: Float32s | None = None) -> Float32s:
        """float32 [samples] at 24,000 per second. Raises EngineError, also when the helper died or was too slow."""
        with self._lock:
            if self._closed:
                raise EngineError("the server is shutting down", code="speech_failed")
            if self._process is not None and self._process.poll() is not None:
                self._end()  # it died while nobody spoke
            if self._process is None:
                self._start()
            kind, value = self._ask(self._limit_s, (text, voice, speed, reference))
        if kind == _FAILED:
            raise EngineError(value, code="speech_failed")
        samples: Float32s = np.frombuffer(value, np.float32)
        return samples

    def close(self) -> None:
        """Ends the helper, in whatever it does; a thread that waits for it gets an EngineError."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> Facts:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at a terminal is the supervisor's to handle
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        kind, value = self._ask(START_S)
        if kind == _FACTS:
            return value  # type: ignore[no-any-return]
        self._end()
        if kind == _MISSING:
            raise MissingPackageError(value)
        raise EngineError(value, code="speech_failed")

    def _ask(self, limit_s: float, question: tuple[Any, ...] | None = None) -> tuple[str, Any]:
        """The next message, after sending `question`; where there is none, the helper's end and an EngineError."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(limit_s, _kill_late, (process, late))
        timer.daemon = True
        timer.start()
        try:
            if self._closed:
                raise EOFError
            if question is not None:
                _send(process.stdin, question)
            return _receive(process.stdout)  # type: ignore[no-any-return]
        except (EOFError, BrokenPipeError):
            self._end()
            why = f"took longer than {limit_s:g} s and was ended" if late.is_set() else "died"
            raise EngineError(f"the process that speaks {why}", code="speech_failed") from None
        finally:
            timer.cancel()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not sent any more
                    stream.close()


def helper_command(*words: str) -> tuple[str, ...]:
    """What starts a helper. `words`: "espeak", or "piper" and the voice's file."""
    return (sys.executable, "-m", __name__, *words)


def _kill_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Raises EOFError."""
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    return pickle.loads(_read(stream, length))


def _read(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


# ---- in the helper -----------------------------------------------------------------------------------------------


def serve(make: Callable[[], Synthesizer]) -> None:
    """Is a helper: loads a synthesizer, then says clauses until the input closes."""
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a service; a drain may still speak
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    questions: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read_questions, args=(questions,), daemon=True).start()
    try:
        synthesizer = make()
    except ImportError as error:
        _send(answers, (_MISSING, str(error)))
        return
    except Exception as error:  # whoever starts a server is told what it was
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        _send(answers, (_FAILED, text))
        return
    _send(answers, (_FACTS, replace(synthesizer.facts, sample_rate=SAMPLE_RATE)))
    while True:
        _send(answers, _answer(synthesizer, *questions.get()))


def _read_questions(questions: SimpleQueue[Any]) -> None:
    """Ends this process when the input closes, whatever else it does."""
    with contextlib.suppress(EOFError):
        while True:
            questions.put(_receive(sys.stdin.buffer))
    os._exit(0)


def _answer(
    synthesizer: Synthesizer, text: str, voice: str, speed: float, reference: Float32s | None
) -> tuple[str, str | bytes]:
    try:
        samples = synthesizer.speak(text, voice, speed, reference)
    except EngineError as error:
        return (_FAILED, error.message)
    except Exception:
        logger.exception("speech failed")
        return (_FAILED, "speech failed")
    samples = resampled(samples, synthesizer.facts.sample_rate, SAMPLE_RATE)
    return (_SOUND, samples.astype(np.float32, copy=False).tobytes())


def main() -> None:
    """`ENGINE [FILE]`."""
    engine, *files = sys.argv[1:]
    if engine == "espeak":
        from weft.speech.espeak import EspeakSynthesizer

        serve(EspeakSynthesizer)
    else:
        from weft.speech.piper import PiperSynthesizer

        serve(lambda: PiperSynthesizer(*files))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
