"""The supervisor: starts the text and engine processes, serves HTTP in its own, and ends everything together.

One process is both supervisor and API, so that a child's death and the streams that it ends meet in one event loop.
Exit codes: 0 drained, 1 failed, 2 bad settings or checkpoint. Children never outlive it: each holds the read end of a
pipe that closes with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from weft.config.describe import to_json
from weft.config.settings import Settings
from weft.core.errors import SettingsError, UnavailableError
from weft.engine.client import EngineClient, ModelFacts, StartError
from weft.ipc.sockets import Endpoints
from weft.server.app import create_app

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # a child that fails sends its reason just before it exits
_CLOSE_S = 3.0  # for answers that are being ended, and for children that are being stopped


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


class Supervisor:
    """Runs one worker from start to exit code; see `run`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._failed = asyncio.Event()

    async def run(self) -> int:
        """Serves until a signal or a failure; returns the exit code. Raises SettingsError before anything is loaded."""
        listener = _bind(self._settings)
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            num_text = max(1, self._settings.text.num_tokenizers)
            endpoints = Endpoints(Path(folder), num_text)
            client = EngineClient(endpoints)
            self._handle_signals()
            try:
                client.start(["engine", *(f"text{i}" for i in range(num_text))])
                await self._start_children(client, endpoints)
                facts = await self._wait_ready(client)
                if facts is None:
                    return 0
                return await self._serve(client, facts, listener)
            except StartError as error:
                print(f"weft: error: {error}", file=sys.stderr, flush=True)
                return error.exit_code
            except UnavailableError as error:
                print(f"weft: error: {error}", file=sys.stderr, flush=True)
                return 1
            finally:
                await self._stop_children()
                await client.close()
                listener.close()

    # ---- start ------------------------------------------------------------------------------------------------

    async def _start_children(self, client: EngineClient, endpoints: Endpoints) -> None:
        line = to_json(self._settings) + b"\n"
        roles = [("engine", 0), *(("text", i) for i in range(endpoints.num_text))]
        for role, index in roles:
            name = role if role == "engine" else f"{role}{index}"
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft.launch.child", role, str(index)),
                *(str(endpoints.folder), str(endpoints.num_text)),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at a terminal is the supervisor's to handle
            )
            assert child.stdin is not None
            with contextlib.suppress(ConnectionError):  # it is dead already; its watcher will say so
                child.stdin.write(line)
                await child.stdin.drain()
            self._children[name] = child
            self._watchers.append(asyncio.create_task(self._watch(client, name, child)))

    async def _watch(self, client: EngineClient, name: str, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        if code > 0:
            await client.wait_failure(_LAST_WORDS_S)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        client.fail(UnavailableError(f"the {name} process {how}", code="engine_dead"))
        self._failed.set()

    async def _wait_ready(self, client: EngineClient) -> ModelFacts | None:
        """The children's facts; None when a signal came first. Raises what kept a child from starting."""
        ready = asyncio.create_task(client.wait_ready())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not ready.done():
            ready.cancel()
            return None
        facts = ready.result()
        engine, text = facts["engine"], facts["text0"]
        model = self._settings.model
        default_name = "weft-demo" if model.path is None else Path(model.path).resolve().name
        return ModelFacts(
            served_name=model.served_name or default_name,
            backend=engine["backend"],
            description=engine["description"],
            dtype=engine["dtype"],
            vocab_size=engine["vocab_size"],
            max_context_tokens=engine["max_context_tokens"],
            kv_tokens=engine["kv_tokens"],
            has_chat_template=text["has_chat_template"],
            created=int(time.time()),
            geometry=engine,
        )

    # ---- serve ------------------------------------------------------------------------------------------------

    async def _serve(self, client: EngineClient, facts: ModelFacts, listener: socket.socket) -> int:
        app = create_app(client, facts, self._settings)
        server = _HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=int(_CLOSE_S),
                server_header=False,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"weft ready on http://{shown}:{port}"
            f" (model {facts.served_name}, backend {facts.backend}, KV {facts.kv_tokens} tokens)",
            flush=True,
        )
        stop = asyncio.create_task(self._stop.wait())
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait((stop, failed, serving), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.is_set():
            logger.error("%s", client.failure)
            await self._settle(app, _CLOSE_S)  # every open answer gets its error before the connections close
        else:
            await self._drain(client, app)
        server.should_exit = True
        await serving
        for task in (stop, failed):
            task.cancel()
        return 1 if self._failed.is_set() else 0

    async def _drain(self, client: EngineClient, app: FastAPI) -> None:
        """Lets open requests end, up to `http.drain_s`; a second signal, or the limit, ends them."""
        app.state.draining = True
        limit = self._settings.http.drain_s
        logger.info("draining: no new requests, up to %g s for those that run", limit)
        idle = asyncio.create_task(app.state.gate.wait_idle())
        self._stop.clear()
        again = asyncio.create_task(self._stop.wait())
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait((idle, again, failed), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            client.fail(UnavailableError("the server is shutting down", code="draining"))
            await self._settle(app, _CLOSE_S)
        for task in (idle, again, failed):
            task.cancel()

    async def _settle(self, app: FastAPI, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(app.state.gate.wait_idle(), limit_s)

    # ---- stop -------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _stop_children(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        for child in self._children.values():
            if child.stdin is not None:
                child.stdin.close()
        waiting = [asyncio.create_task(child.wait()) for child in self._children.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_CLOSE_S)
            for child in self._children.values():
                if child.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.kill()
            if late:
                await asyncio.wait(late)


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
