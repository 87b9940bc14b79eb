"""POST /v1/audio/speech: text in, audio out, clause by clause.

Invariants: sound is made in threads, never in the event loop; the next clause is made when the one before was taken;
a client that goes away stops it after the present clause. Headers leave with the first clause, so that an error before
it has its real status; a later one cuts the connection, since what was sent is not the whole answer.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from weft.core.errors import InvalidRequestError, NotFoundError, QueueFullError, UnavailableError, WeftError
from weft.core.plan import Float32s
from weft.server.bodies import read_body
from weft.server.jobs import Server
from weft.server.schemas import SpeechRequest
from weft.server.sessions import ID_HEADER, TTL_HEADER
from weft.web.gone import unless_gone

AT_ONCE = 4
"""Answers that are being spoken; one more is refused."""

OPENAI_MODEL = "tts-1"
OPENAI_VOICES = frozenset({"alloy", "echo", "fable", "onyx", "nova", "shimmer"})
"""Clients come with these names; here they all stand for the default voice."""

_MEDIA_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}
_UNKNOWN_LENGTH = 0xFFFFFFFF  # in a WAV header: it goes on until the stream ends


class Speaker(Protocol):
    """What this endpoint speaks with; whoever makes the app brings it. Any thread may call it."""

    name: str
    sample_rate: int
    default_voice: str

    def check(self, voice: str, speed: float) -> None:
        """Raises InvalidRequestError for what it does not have."""

    def speak(self, text: str, voice: str, speed: float) -> Iterator[Float32s]:
        """float32 [samples], mono, -1 to 1, one array per clause, each made when it is asked for."""


class Desk:
    """Where an app's speech is made; `app.state.speech`. `used`: answers that are being spoken."""

    def __init__(self, speaker: Speaker | None, engine: str) -> None:
        """`engine`: the setting, for the reason why there is no speaker."""
        self._speaker = speaker
        self._engine = engine
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="speech")
        self.used = 0

    def speaker(self) -> Speaker:
        """Raises NotFoundError where nothing speaks here."""
        if self._speaker is not None:
            return self._speaker
        why = "speech.engine is none" if self._engine == "none" else "it needs pip install 'weft[speech]'"
        raise NotFoundError(f"audio/speech: this server does not provide it ({why})")

    def take(self) -> None:
        """Takes one of the places. Raises QueueFullError."""
        if self.used >= AT_ONCE:
            raise QueueFullError(f"{AT_ONCE} texts are being spoken already", retry_after_s=1.0)
        self.used += 1

    async def next(self, clauses: Iterator[Float32s]) -> Float32s | None:
        """The next clause; None: there is none. When it is cancelled, it waits for the clause all the same."""
        making = asyncio.get_running_loop().run_in_executor(self._threads, next, clauses, None)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait((making,))  # a thread cannot be broken off, and its place is not free before
            raise


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
    voice = speaker.default_voice if body.voice is None or body.voice in OPENAI_VOICES else body.voice
    speed = 1.0 if body.speed is None else body.speed
    speaker.check(voice, speed)
    desk.take()
    return AudioStream(desk, speaker.speak(body.input, voice, speed), body.response_format, speaker.sample_rate)


def _check_model(name: str | None, allowed: tuple[str, ...]) -> None:
    if name is not None and name not in allowed:
        text = f"model: {name[:80]!r} does not speak here (allowed: {', '.join(map(repr, allowed))})"
        raise NotFoundError(text, param="model", code="model_not_found")


class AudioStream(Response):
    """Audio on its way to the client. Errors before its first byte are raised from `__call__`."""

    def __init__(self, desk: Desk, clauses: Iterator[Float32s], form: str, rate: int) -> None:
        """Gives back the place at the desk that was taken for it. `form`: "wav" or "pcm"."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = _MEDIA_TYPES[form]
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._desk = desk
        self._clauses = clauses
        self._head = wav_header(rate) if form == "wav" else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(send))
        finally:
            self._desk.used -= 1

    async def _run(self, send: Send) -> None:
        clause = await self._desk.next(self._clauses)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        data = self._head
        while clause is not None:
            await send({"type": "http.response.body", "body": data + pcm(clause), "more_body": True})
            data = b""
            try:
                clause = await self._desk.next(self._clauses)
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
