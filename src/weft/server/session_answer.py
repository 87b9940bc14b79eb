"""The answer of a streaming session's turn on its way to the client: chunks of text and of audio.

Invariants: chunks are numbered in the order in which they are sent; the last one, and no other, is final; text is sent
as it comes, and never waits for audio, which has a task of its own; failing speech ends the audio, not the answer.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable

from weft.core.errors import WeftError
from weft.core.plan import Float32s
from weft.ipc.messages import End, TextDelta
from weft.server.jobs import Job
from weft.server.speech import Utterance
from weft.web.frames import Frame

Send = Callable[[Frame], Awaitable[None]]

AUDIO_RATE = 24_000


class Answer:
    """See the module's docstring. `send` takes frames for the client.

    Attributes:
        text: what was sent, with that of the resumed part.
        generated: tokens of it.
    """

    def __init__(
        self, job: Job, utterance: Utterance | None, send: Send, with_ids: bool, text: str, num_resumed: int
    ) -> None:
        self.begun_s = time.monotonic()
        self.text = text
        self.generated = num_resumed
        self.finish_reason = "abort"
        self.stopped = False
        self._job = job
        self._utterance = utterance
        self._send = send
        self._with_ids = with_ids
        self._chunks = 0
        self._final_sent = False
        self._sending = asyncio.Lock()

    @property
    def begun(self) -> bool:
        """Something was sent."""
        return self._chunks > 0

    def stop(self) -> bool:
        if self.stopped or self._final_sent:
            return False
        self.stopped = True
        self.finish_reason = "abort"
        self._job.succeeded()
        self.close()
        return True

    def close(self) -> None:
        self._job.close()
        if self._utterance is not None:
            self._utterance.close()

    async def run(self) -> None:
        """Sends all chunks. Raises the WeftError that ended the text."""
        speaking = None if self._utterance is None else asyncio.ensure_future(self._speak(self._utterance))
        try:
            await self._say()
            if self._utterance is not None and speaking is not None:
                self._utterance.finish()
                await speaking
            if not self._final_sent:
                await self._chunk(final=True)
            self._job.succeeded()
        except WeftError as error:
            self._job.failed(error)
            raise
        finally:
            self.close()
            if speaking is not None:
                speaking.cancel()
                await asyncio.gather(speaking, return_exceptions=True)

    async def _say(self) -> None:
        while deltas := await self._job.generation.take():
            if self.stopped:
                return
            self._job.streamed(deltas)
            for delta in deltas:
                self._job.index(delta)
                await self._send_text(delta)

    async def _send_text(self, delta: TextDelta) -> None:
        if self.stopped:
            return
        if delta.end is not None:
            self._ended(delta.end)
        else:
            self.generated += len(delta.token_ids)
        final = delta.end is not None and self._utterance is None
        if delta.text and self._utterance is not None:
            self._utterance.push(delta.text)
        if delta.text or final or (self._with_ids and delta.token_ids):
            await self._chunk(delta, final=final)

    def _ended(self, end: End) -> None:
        self.generated = end.completion_tokens
        self.finish_reason = end.finish_reason or "stop"

    async def _speak(self, utterance: Utterance) -> None:
        """Sends what is said. A voice that fails ends the audio, not the answer."""
        try:
            while (samples := await utterance.next()) is not None:
                await self._chunk(samples=samples)
        except WeftError as error:
            if not self.stopped:
                message = f"the answer goes on without audio: {error.message}"
                await self._send({"type": "error", "code": "speech_failed", "message": message})

    async def _chunk(
        self, delta: TextDelta | None = None, samples: Float32s | None = None, *, final: bool = False
    ) -> None:
        async with self._sending:
            if self.stopped and not final:  # it came while this one waited for its turn
                return
            self._final_sent = self._final_sent or final
            if delta is not None:
                self.text += delta.text
            frame = {
                "type": "chunk",
                "chunk_index": self._chunks,
                "text_delta": None if delta is None else delta.text or None,
                "audio_data": None,
                "audio_sample_rate": None,
                "duration_ms": None,
                "is_final": final,
            }
            if samples is not None:
                frame["audio_data"] = base64.b64encode(samples.astype("<f4", copy=False).tobytes()).decode()
                frame["audio_sample_rate"] = AUDIO_RATE
                frame["duration_ms"] = round(1000 * len(samples) / AUDIO_RATE, 3)
            if self._with_ids and delta is not None:
                frame["token_ids"] = delta.token_ids
            self._chunks += 1
            await self._send(frame)
