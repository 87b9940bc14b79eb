"""What the processes that serve HTTP have in common: the listening socket, uvicorn, the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.config.settings import HttpSettings
from weft.core.errors import SettingsError

CLOSE_S = 3.0
"""For answers that are being ended."""

_PONG_S = 120.0  # a client that is slow to take its answer is also slow to answer a ping


class HttpServer(uvicorn.Server):
    """uvicorn for an app, without its own signal handling, telling when it listens."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_limited(settings.max_connections),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="websockets-sansio",
                ws_max_size=settings.max_body_bytes,
                ws_ping_timeout=_PONG_S,
                ws_per_message_deflate=False,  # tokens are too short for it, and audio does not shrink
                timeout_graceful_shutdown=int(CLOSE_S),
                server_header=False,
            )
        )
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _limited(max_connections: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, but a connection too many is closed as soon as it is accepted."""

    class Limited(HttpToolsProtocol):
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._refused = len(self.connections) >= max_connections
            if self._refused:
                transport.abort()
            else:
                super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._refused:
                super().connection_lost(exc)

    return Limited


def bind(settings: HttpSettings) -> socket.socket:
    """The listening socket, taken before anything is loaded. Raises SettingsError where it cannot be had."""
    host, port = settings.host, settings.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(f"http.host {host}, http.port {port}: cannot listen there: {error}") from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Where it listens, as an address for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def first_of(*waits: Any, timeout_s: float | None = None) -> int | None:
    """Which of several waits is over first; None: none of them in time. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return next((number for number, task in enumerate(tasks) if task.done()), None)
    finally:
        for task in tasks:
            task.cancel()


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs a process's coroutine to its exit code."""
    try:
        import uvloop
    except ImportError:  # not on every platform; the standard loop does the same, slower
        return asyncio.run(main)
    return uvloop.run(main)
