"""The connection to a worker, against a server that sends exactly the bytes of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from weft.gateway.upstream import Exchange, Upstream, UpstreamError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    """Answers each request on each connection with the next of `answers`; None closes instead."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
            else:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.closed.set()


@asynccontextmanager
async def upstream_to(server: Server) -> AsyncIterator[Upstream]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}")
    async with asyncio.timeout(20):
        try:
            yield upstream
        finally:
            upstream.close()
            for writer in server.writers:
                writer.close()
            listening.close()


async def get(upstream: Upstream, body: bytes = b"") -> Exchange:
    return await upstream.send("POST" if body else "GET", "/x?y=1", [(b"a", b"b")], body)


async def test_a_connection_is_kept_after_a_whole_answer() -> None:
    server = Server(OK, OK)
    async with upstream_to(server) as upstream:
        for body in (b"", b"asked"):
            exchange = await get(upstream, body)
            assert exchange.status == 200 and await exchange.read_all() == b"hello"
        assert server.connections == 1
        assert server.requests[1].startswith(b"POST /x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\na: b\r\ncontent-length: 5\r\n\r\nasked" in server.requests[1]


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"hello", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b"", True),
        (OK.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n"), b"hello", False),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", b"", True),
    ],
)
async def test_forms_of_answers(answer: bytes, body: bytes, kept: bool) -> None:
    server = Server(answer, OK)
    async with upstream_to(server) as upstream:
        exchange = await get(upstream)
        assert await exchange.read_all() == body
        exchange.close()
        if kept:
            assert await (await get(upstream)).read_all() == b"hello"
            assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    ],
)
async def test_what_breaks_off(answer: bytes | None) -> None:
    server = Server(answer, None)
    async with upstream_to(server) as upstream:
        with pytest.raises(UpstreamError) as broken:
            exchange = await get(upstream)
            server.writers[0].close()
            await exchange.read_all()
        assert not broken.value.refused


async def test_a_kept_connection_that_the_worker_has_closed() -> None:
    """Nobody notices: a new one is made."""
    server = Server(OK, None, OK)
    async with upstream_to(server) as upstream:
        assert await (await get(upstream)).read_all() == b"hello"
        assert await (await get(upstream)).read_all() == b"hello"  # the second is closed without an answer
        assert server.connections == 2


async def test_nobody_there() -> None:
    server = Server(OK)
    async with upstream_to(server) as upstream:
        pass
    with pytest.raises(UpstreamError) as refused:
        await get(upstream)
    assert refused.value.refused


async def test_an_answer_that_is_not_read_to_its_end_closes_its_connection() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", OK)
    async with upstream_to(server) as upstream:
        exchange = await get(upstream)
        assert await exchange.read() == b"abc"
        exchange.close()
        await server.closed.wait()
        assert await (await get(upstream)).read_all() == b"hello"
        assert server.connections == 2


async def test_too_long_an_answer() -> None:
    server = Server(OK)
    async with upstream_to(server) as upstream:
        with pytest.raises(UpstreamError):
            await (await get(upstream)).read_all(3)
