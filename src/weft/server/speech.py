"""Speech: text that comes piece by piece goes in, audio comes out clause by clause; and POST /v1/audio/speech.

`Desk.begin` opens an `Utterance`, which whoever opened it closes. Invariants: sound is made in threads, never in the
event loop, at most `AHEAD` clauses before they are taken; text never waits for sound; what fails ends the audio of one
utterance. A place at the desk is taken until the utterance is closed and its thread is done.

Of an HTTP answer headers leave with the first clause, so that an error before it has its real status; a later one cuts
the connection, since what was sent is not the whole answer.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from weft.core.errors import (
    EngineError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
    WeftError,
)
from weft.core.plan import Float32s
from weft.server.bodies import read_body
from weft.server.jobs import Server
from weft.server.schemas import SpeechRequest
from weft.server.sessions import ID_HEADER, TTL_HEADER
from weft.web.gone import unless_gone

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Utterances at a time; one more is refused."""

AHEAD = 3
"""Clauses of one utterance that are made, or being made, and that nobody has taken yet."""

OPENAI_MODEL = "tts-1"
OPENAI_VOICES = frozenset({"alloy", "echo", "fable", "onyx", "nova", "shimmer"})
"""Clients come with these names; here they all stand for the default voice."""

_MEDIA_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
_UNKNOWN_LENGTH = 0xFFFFFFFF  # in a WAV header: it goes on until the stream ends


class Speech(Protocol):
    """One text on its way to sound."""

    def push(self, text: str) -> list[str]:
        """The clauses that are complete with this text; quick, for the event loop."""

    def finish(self) -> list[str]:
        """What is left at the end of the text."""

    def say(self, clause: str) -> Float32s:
        """float32 [samples], mono, -1 to 1. Takes its time; called in any thread, one at a time. Raises WeftError."""


class Speaker(Protocol):
    """What a desk speaks with; whoever makes the app brings it.

    Attributes:
        name: the engine's.
        sample_rate: of all that it says.
        default_voice: the one of utterances that name none.
    """

    name: str
    sample_rate: int
    default_voice: str

    def begin(self, voice: str, speed: float, reference: Float32s | None) -> Speech:
        """`reference`: float32 [samples], mono, 16 kHz, whose voice is to be imitated.

        Raises InvalidRequestError for what it does not take.
        """

    def close(self) -> None:
        """Breaks off whatever is being said; nothing is said any more."""


class Utterance:
    """One text being spoken. All methods are for the event loop; only `next` waits, for one caller at a time."""

    def __init__(self, desk: Desk, speech: Speech) -> None:
        self._desk = desk
        self._speech = speech
        self._clauses: deque[str] = deque()  # to be made
        self._made: deque[Float32s] = deque()  # to be taken
        self._making: asyncio.Future[Float32s] | None = None
        self._changed = asyncio.Event()
        self._failure: WeftError | None = None
        self._finished = self._closed = False

    def push(self, text: str) -> None:
        """More text; ignored once speaking has failed or the utterance is closed. Never blocks."""
        if self._failure is None and not self._closed:
            self._clauses += self._speech.push(text)
            self._make()

    def finish(self) -> None:
        """There is no more text."""
        if not self._finished and self._failure is None and not self._closed:
            self._clauses += self._speech.finish()
            self._make()
        self._finished = True
        self._changed.set()

    async def next(self) -> Float32s | None:
        """The next clause, float32 [samples]; None: it was the last, or the utterance is closed.

        Raises WeftError when speaking has failed, after the clauses that were made before. May be cancelled.
        """
        while not self._made:
            if self._failure is not None:
                raise self._failure
            if self._closed or (self._finished and self._making is None):
                return None
            self._changed.clear()
            await self._changed.wait()
        samples = self._made.popleft()
        self._make()
        return samples

    def close(self) -> None:
        """Drops what is left, also the clause that is being made. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._clauses.clear()
        self._made.clear()
        self._changed.set()
        if self._making is None:  # otherwise its place is free when the thread is
            self._desk.leave()

    def _make(self) -> None:
        if self._making is None and self._clauses and len(self._made) < AHEAD:
            try:
                self._making = self._desk.in_thread(self._speech, self._clauses.popleft())
            except UnavailableError as error:
                self._fail(error)
            else:
                self._making.add_done_callback(self._landed)

    def _landed(self, making: asyncio.Future[Float32s]) -> None:
        self._making = None
        error = EngineError("speech was broken off", code="speech_failed") if making.cancelled() else making.exception()
        if error is None:
            self._desk.seconds += len(making.result()) / self._desk.speaker().sample_rate
        if self._closed:
            self._desk.leave()
            return
        if error is None:
            self._made.append(making.result())
            self._make()
        else:
            self._fail(error)
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._desk.failures += 1
        self._clauses.clear()
        if isinstance(error, WeftError):
            self._failure = error
        else:
            logger.error("speech failed", exc_info=error)
            self._failure = EngineError("speech failed", code="speech_failed")


class Desk:
    """Where an app's speech is made; `app.state.speech`.

    Attributes:
        used: places that are taken.
        seconds: audio made so far.
        failures: utterances that an error ended.
    """

    def __init__(self, speaker: Speaker | None, engine: str) -> None:
        """`engine`: the setting, for the reason why there is no speaker."""
        self._speaker = speaker
        self._engine = engine
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="speech")
        self._closed = False
        self.used = 0
        self.seconds = 0.0
        self.failures = 0

    def speaker(self) -> Speaker:
        """Raises NotFoundError where nothing speaks here."""
        if self._speaker is not None:
            return self._speaker
        why = "speech.engine is none" if self._engine == "none" else "it needs pip install 'weft[speech]'"
        raise NotFoundError(f"audio/speech: this server does not provide it ({why})")

    def begin(self, voice: str | None, speed: float | None, reference: Float32s | None) -> Utterance:
        """Takes a place for one text; `close` of what this returns gives it back.

        `voice`: None and OpenAI's names are the default one. `reference`: float32 [samples], mono, 16 kHz.
        Raises NotFoundError without speech, InvalidRequestError for what the engine does not take, QueueFullError.
        """
        speaker = self.speaker()
        chosen = speaker.default_voice if voice is None or voice in OPENAI_VOICES else voice
        speech = speaker.begin(chosen, 1.0 if speed is None else speed, reference)
        if self.used >= AT_ONCE:
            raise QueueFullError(f"{AT_ONCE} texts are being spoken already", retry_after_s=1.0)
        self.used += 1
        return Utterance(self, speech)

    def in_thread(self, speech: Speech, clause: str) -> asyncio.Future[Float32s]:
        """For utterances: the clause's sound. Each has a thread. Raises UnavailableError once closed."""
        if self._closed:
            raise UnavailableError("the server is shutting down", code="draining")
        return asyncio.get_running_loop().run_in_executor(self._threads, speech.say, clause)

    def leave(self) -> None:
        """For utterances: gives a place back."""
        self.used -= 1

    async def close(self) -> None:
        """Breaks off what is being said and ends the threads."""
        self._closed = True
        if self._speaker is not None:
            await asyncio.to_thread(self._speaker.close)
        await asyncio.to_thread(self._threads.shutdown)


async def speech(request: Request) -> Response:
    """The text as audio."""
    server: Server = request.app.state.server
    desk: Desk = request.app.state.speech
    speaker = desk.speaker()
    if server.draining:
        raise UnavailableError("the server is shutting down and takes no new requests", code="draining")
    for header in (ID_HEADER, TTL_HEADER):
        if header in request.headers:
            raise InvalidRequestError(f"{header}: speech keeps nothing, so there is no session", param=header)
    body = await read_body(request, SpeechRequest)
    _check_model(body.model, (server.facts.served_name, OPENAI_MODEL, speaker.name))
    utterance = desk.begin(body.voice, body.speed, None)
    return AudioStream(utterance, body.input, body.response_format, speaker.sample_rate)


def _check_model(name: str | None, allowed: tuple[str, ...]) -> None:
    if name is not None and name not in allowed:
        text = f"model: {name[:80]!r} does not speak here (allowed: {', '.join(map(repr, allowed))})"
        raise NotFoundError(text, param="model", code="model_not_found")


class AudioStream(Response):
    """Audio on its way to the client. Errors before its first byte are raised from `__call__`."""

    def __init__(self, utterance: Utterance, text: str, form: str, rate: int) -> None:
        """Says `text` and closes the utterance. `form`: "wav" or "pcm"."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = _MEDIA_TYPES[form]
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._utterance = utterance
        self._text = text
        self._head = wav_header(rate) if form == "wav" else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(send))
        finally:
            self._utterance.close()

    async def _run(self, send: Send) -> None:
        self._utterance.push(self._text)
        self._utterance.finish()
        clause = await self._utterance.next()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        data = self._head
        while clause is not None:
            await send({"type": "http.response.body", "body": data + pcm(clause), "more_body": True})
            data = b""
            try:
                clause = await self._utterance.next()
            except WeftError as error:
                raise BrokenSpeech(error.message) from error
        await send({"type": "http.response.body", "body": data, "more_body": False})


class BrokenSpeech(Exception):
    """Speech failed after its first clause: no error can be told any more, the connection has to be cut."""


def pcm(samples: Float32s) -> bytes:
    """float32 [samples] from -1 to 1 as little-endian int16; louder ones are cut off."""
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


def wav_header(rate: int) -> bytes:
    """The start of a WAV file, mono int16, of a length that is not known yet."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", _UNKNOWN_LENGTH, b"WAVE") + form + struct.pack("<4sI", b"data", _UNKNOWN_LENGTH)
    )
