"""HTTP/1.1 to the workers: kept connections, answers as they come, back-pressure, and nothing else.

A general client costs more per piece of a stream than the engine does per token, so this one is a protocol under
httptools. Invariants: a connection serves one exchange at a time and goes back to the idle ones only after a whole
answer; of an answer that is read slower than it comes, at most `HIGH_BYTES` and one read lie here; closing an exchange
before its end closes its connection, which is how the worker learns that nobody wants the rest.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httptools

HIGH_BYTES = 64 * 1024
"""Unread bytes of an answer beyond which reading from the worker pauses."""

CONNECT_LIMIT_S = 5.0
MAX_IDLE = 128

Headers = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The worker could not be reached, or broke off. `refused`: it was not even reached."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Upstream:
    """Connections to one worker. Used from one event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._host_header = parts.netloc.encode()
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Exchange:
        """Sends a request and waits for the head of its answer. Raises UpstreamError.

        A kept connection that the worker had closed in the meantime is replaced once, without a word.
        """
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), path.encode("latin-1"), self._host_header)]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        data = b"".join((*lines, b"\r\n", body))
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            try:
                return await self._exchange(connection, data)
            except UpstreamError:
                if connection.heard:  # it had begun to answer: not a matter of an old connection
                    raise
        return await self._exchange(await self._connect(), data)

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except TimeoutError:
            raise UpstreamError(f"no connection within {CONNECT_LIMIT_S:g} s", refused=True) from None
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            raise UpstreamError(f"cannot connect: {error}", refused=True) from None
        return connection

    async def _exchange(self, connection: _Connection, data: bytes) -> Exchange:
        connection.begin(data)
        try:
            await connection.head_read()
        except BaseException:
            connection.abort()
            raise
        return Exchange(self, connection)

    def _done(self, connection: _Connection) -> None:
        if connection.reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()


class Exchange:
    """An answer on its way: `status` and `headers` are there, the body is read piece by piece."""

    def __init__(self, upstream: Upstream, connection: _Connection) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._upstream = upstream
        self._connection: _Connection | None = connection

    async def read(self) -> bytes:
        """What has come, or else what comes next; nothing at the end. Raises UpstreamError when it breaks off."""
        connection = self._connection
        if connection is None:
            return b""
        data = connection.taken() or await connection.next_body()
        if not data:
            self._connection = None
            self._upstream._done(connection)
        return data

    async def read_all(self, limit_bytes: int | None = None) -> bytes:
        """The rest of the body. Raises UpstreamError, also when it is longer than the limit."""
        pieces: list[bytes] = []
        size = 0
        while data := await self.read():
            pieces.append(data)
            size += len(data)
            if limit_bytes is not None and size > limit_bytes:
                self.close()
                raise UpstreamError(f"an answer of more than {limit_bytes} bytes")
        return b"".join(pieces)

    def close(self) -> None:
        """Idempotent; before the end of the answer it closes the connection."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None


class _Connection(asyncio.Protocol):
    """One connection; the callbacks below `data_received` are httptools'."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._body: list[bytes] = []
        self._size = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self.status = 0
        self.headers: Headers = []
        self.heard = self.closed = False
        self._head_done = self._done = False
        self.reusable = False

    # ---- for Upstream and Exchange ----------------------------------------------------------------------------

    def begin(self, data: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, []
        self.heard = self._head_done = self._done = self.reusable = False
        self._transport.write(data)

    async def head_read(self) -> None:
        while not self._head_done:
            await self._wait()

    async def next_body(self) -> bytes:
        while not self._body and not self._done:
            await self._wait()
        return self.taken()

    def taken(self) -> bytes:
        """All that has come and was not taken."""
        if not self._body:
            return b""
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self._done:
            self._error = UpstreamError(f"the worker broke off: {error or 'connection closed'}")
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done:  # nobody asked
            self.abort()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = UpstreamError(f"not HTTP: {error}")
            self.abort()
        if self._size > HIGH_BYTES and not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    # ---- httptools --------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._head_done = self.status >= 200
        if not self._head_done:  # 100 Continue and its like
            self.headers = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._size += len(data)

    def on_message_complete(self) -> None:
        if not self._head_done:
            return
        self._done = True
        self.reusable = bool(self._parser.should_keep_alive()) and not self.closed
