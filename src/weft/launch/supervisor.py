"""The supervisor: starts the text and engine processes, serves HTTP in its own, and ends everything together.

One process is both supervisor and API, so that a child's death and the streams that it ends meet in one event loop.
Exit codes: 0 drained, 1 failed, 2 bad settings or checkpoint. With `engine.restart` a failure ends the open requests
and starts all children again, unless they die too often. Children never outlive the supervisor: each holds the read
end of a pipe that closes with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.config.settings import Settings
from weft.core.errors import SettingsError, UnavailableError
from weft.engine.client import EngineClient, ModelFacts, StartError
from weft.launch.children import Children, new_endpoints
from weft.launch.garbage import settle
from weft.server.app import create_app
from weft.speech.registry import create_speaker

logger = logging.getLogger(__name__)

_CLOSE_S = 3.0  # for answers that are being ended
_PONG_S = 120.0  # a client that is slow to take its answer is also slow to answer a ping
_MAX_DEATHS, _DEATHS_S = 3, 60.0
"""With so many deaths in so many seconds, starting again is given up."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, telling when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
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


class Supervisor:
    """Runs one worker from start to exit code; see `run`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._failed = asyncio.Event()
        self._speaker = create_speaker(settings)
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._children: Children
        self._client: EngineClient

    async def run(self) -> int:
        """Serves until a signal or a failure; returns the exit code. Raises SettingsError before anything is loaded."""
        listener = _bind(self._settings)
        endpoints = new_endpoints(self._settings)
        self._client = EngineClient(endpoints)
        self._children = Children(self._settings, endpoints, self._client, self._failed.set)
        self._handle_signals()
        try:
            self._client.start(self._children.roles)
            facts = await self._wait_ready()
            if facts is None:
                return 0
            return await self._serve(facts, listener)
        except StartError as error:
            print(f"weft: error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        except UnavailableError as error:
            print(f"weft: error: {error}", file=sys.stderr, flush=True)
            return 1
        finally:
            await self._children.stop()
            await self._client.close()
            listener.close()

    # ---- start ------------------------------------------------------------------------------------------------

    async def _wait_ready(self) -> ModelFacts | None:
        """Starts the children; their facts, or None when a signal came first. Raises what kept one from starting."""
        await self._children.start()
        ready = asyncio.create_task(self._client.wait_ready())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not ready.done():
            ready.cancel()
            return None
        facts = ready.result()
        self._children.watch_heartbeats()
        engine, text = facts["engine"], facts["text0"]
        return ModelFacts(
            served_name=self._settings.model.public_name,
            backend=engine["backend"],
            description=engine["description"],
            dtype=engine["dtype"],
            vocab_size=engine["vocab_size"],
            max_context_tokens=engine["max_context_tokens"],
            kv_tokens=engine["kv_tokens"],
            has_chat_template=text["has_chat_template"],
            created=int(time.time()),
            geometry=engine,
            features=frozenset(engine["features"]),
            dimensions=engine["dimensions"],
        )

    # ---- serve ------------------------------------------------------------------------------------------------

    async def _serve(self, facts: ModelFacts, listener: socket.socket) -> int:
        app = create_app(self._client, facts, self._settings, self._speaker)
        server = _HttpServer(
            uvicorn.Config(
                app,
                http=_limited(self._settings.http.max_connections),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="websockets-sansio",
                ws_max_size=self._settings.http.max_body_bytes,
                ws_ping_timeout=_PONG_S,
                ws_per_message_deflate=False,  # tokens are too short for it, and audio does not shrink
                timeout_graceful_shutdown=int(_CLOSE_S),
                server_header=False,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        settle()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"weft ready on http://{shown}:{port}"
            f" (model {facts.served_name}, backend {facts.backend}, KV {facts.kv_tokens} tokens)",
            flush=True,
        )
        try:
            code = await self._until_the_end(app, serving)
            server.should_exit = True
            await serving
        finally:
            await app.state.speech.close()
        return code

    async def _until_the_end(self, app: FastAPI, serving: asyncio.Task[None]) -> int:
        """Waits for a signal, then drains; or for a failure that is not mended."""
        while True:
            await self._first_of(self._stop.wait(), self._failed.wait(), asyncio.shield(serving))
            if not self._failed.is_set():
                await self._drain(app)
                return 1 if self._failed.is_set() else 0
            logger.error("%s", self._client.failure)
            await self._settle(app)  # every open answer gets its error before the connections close
            if not await self._started_again():
                return 0 if self._stop.is_set() else 1

    async def _started_again(self) -> bool:
        """After a death, with `engine.restart`: whether a new set of children serves."""
        while self._settings.engine.restart:
            now = time.monotonic()
            self._deaths.append(now)
            if len(self._deaths) == _MAX_DEATHS and now - self._deaths[0] < _DEATHS_S:
                logger.error("%d deaths within %g s: given up", _MAX_DEATHS, _DEATHS_S)
                return False
            await self._children.stop()
            self._failed.clear()
            endpoints = new_endpoints(self._settings)
            self._children = Children(self._settings, endpoints, self._client, self._failed.set)
            self._client.reopen(endpoints, self._children.roles)
            try:
                if await self._wait_ready() is None:
                    return False
            except (StartError, UnavailableError) as error:
                logger.error("the engine did not start again: %s", error)
                continue
            logger.warning("the engine was started again and serves")
            return True
        return False

    async def _drain(self, app: FastAPI) -> None:
        """Lets open requests end, up to `http.drain_s`; a second signal, or the limit, ends them."""
        app.state.draining = True
        limit = self._settings.http.drain_s
        logger.info("draining: no new requests, up to %g s for those that run", limit)
        self._stop.clear()

        async def idle() -> None:
            await app.state.sessions.drain()
            await app.state.gate.wait_idle()

        if await self._first_of(idle(), self._stop.wait(), self._failed.wait(), timeout_s=limit) != 0:
            self._client.fail(UnavailableError("the server is shutting down", code="draining"))
            await self._settle(app)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(app.state.sessions.close_all(), _CLOSE_S)

    async def _settle(self, app: FastAPI) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(app.state.gate.wait_idle(), _CLOSE_S)

    async def _first_of(self, *waits: Any, timeout_s: float | None = None) -> int | None:
        """Which of several waits is over first; None: none of them in time. The others are cancelled."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return next((number for number, task in enumerate(tasks) if task.done()), None)
        finally:
            for task in tasks:
                task.cancel()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)


def _bind(settings: Settings) -> socket.socket:
    """The listening socket, taken before anything is loaded. Raises SettingsError where it cannot be had."""
    host, port = settings.http.host, settings.http.port
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


def serve(settings: Settings) -> int:
    """Runs a worker; returns its exit code. Raises SettingsError before anything is loaded."""

    async def main() -> int:
        return await Supervisor(settings).run()

    return _run(main())


def _run(coroutine: Any) -> int:
    try:
        import uvloop
    except ImportError:  # not on every platform; the standard loop does the same, slower
        return int(asyncio.run(coroutine))
    return int(uvloop.run(coroutine))
