"""Carries a job's deltas to its client: as one document or as server-sent events.

An answer is made by a `Writer`, one class per endpoint and form. Invariants:

- The headers of a stream leave with the first token, or after `sse_keep_alive_s` with a comment; until then an error is
  an answer with its real status. After that it is one `error` event, and the stream ends.
- A client that goes away closes its job at once: one task waits for the server's `http.disconnect`; nothing polls.
- Deltas that are already waiting leave in one write.
- A gateway is told token ids in a comment line at the start of the event that they belong to; see `gateways`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from weft.core.errors import WeftError
from weft.ipc.messages import TextDelta
from weft.server.gateways import tokens_line
from weft.server.jobs import Job
from weft.web.errors import error_body, internal_error, log
from weft.web.gone import ClientGone, unless_gone

KEEP_ALIVE = b": keep-alive\n\n"


class Writer(Protocol):
    """Turns deltas into bytes of the answer."""

    def add(self, delta: TextDelta) -> bytes:
        """What to send for this delta; nothing when the answer is one document. Raises the error that ended it."""

    def finish(self) -> bytes:
        """What to send when every choice has ended."""


async def answer(job: Job, writer: Writer, receive: Receive, stream: bool, keep_alive_s: float) -> Response:
    """The HTTP answer of a started job, which it closes. Raises WeftError, or ClientGone."""
    if stream:
        return EventStream(job, writer, keep_alive_s)
    try:
        content = await unless_gone(receive, _whole(job, writer))
        job.succeeded()
    except WeftError as error:
        job.failed(error)
        raise
    finally:
        job.close()
    return Response(content, media_type="application/json")


async def _whole(job: Job, writer: Writer) -> bytes:
    while deltas := await job.generation.take():
        for delta in deltas:
            writer.add(delta)
    return writer.finish()


class EventStream(Response):
    """A stream of server-sent events. Errors before its first byte are raised from `__call__`."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, writer: Writer, keep_alive_s: float) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job = job
        self._writer = writer
        self._keep_alive_s = keep_alive_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(send))
        except ClientGone:
            if not self._started:
                raise
        finally:
            self._job.close()

    async def _run(self, send: Send) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(self._keep_alive_s):
                        deltas = await self._job.generation.take()
                except TimeoutError:
                    await self._send(send, KEEP_ALIVE)
                    continue
                if not deltas:
                    break
                await self._send_deltas(send, deltas)
            self._job.succeeded()
            await self._send(send, self._writer.finish(), last=True)
        except WeftError as error:
            await self._fail(send, error)
        except Exception as error:
            log.exception("request %d: the stream broke", self._job.engine_id)
            await self._fail(send, internal_error(error))

    async def _send_deltas(self, send: Send, deltas: list[TextDelta]) -> None:
        chunks = []
        self._job.streamed(deltas)
        try:
            for delta in deltas:
                chunks.append(self._chunk(delta))
        except WeftError:
            if self._started:  # what came before the error still goes out
                await self._send(send, b"".join(chunks))
            raise
        await self._send(send, b"".join(chunks))

    def _chunk(self, delta: TextDelta) -> bytes:
        """One event block, or nothing; for a gateway with the delta's token ids, of which a block may consist."""
        chunk = self._writer.add(delta)
        if delta.token_ids and self._job.tells_tokens:
            return tokens_line(delta.token_ids) + (chunk or b"\n")
        return chunk

    async def _fail(self, send: Send, error: WeftError) -> None:
        self._job.failed(error)
        self._job.close()  # the other choices need not go on
        if not self._started:
            raise error
        await self._send(send, b"event: error\ndata: " + error_body(error) + b"\n\n", last=True)

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        if not data and not last:
            return
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not last})
