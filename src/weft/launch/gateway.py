"""`weft gateway`: the gateway's process, and with `--spawn` the workers before which it stands.

Exit codes: 0 drained, 1 failed, 2 bad settings or, of spawned workers, a bad model. Spawned workers never outlive it:
each holds the read end of a pipe that closes with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

import msgspec

from weft.config.settings import Settings
from weft.gateway.app import Gateway
from weft.gateway.workers import Worker
from weft.launch.garbage import settle
from weft.launch.http import CLOSE_S, HttpServer, address_of, bind, first_of, run
from weft.launch.logs import set_up_logging
from weft.launch.workers import SpawnedWorker

logger = logging.getLogger(__name__)


class GatewayProcess:
    """Runs one gateway from start to exit code; see `run`."""

    def __init__(self, settings: Settings, urls: list[str], spawn: int) -> None:
        self._settings = settings
        self._urls = urls
        self._spawn = spawn
        self._stop = asyncio.Event()
        self._failed = asyncio.Event()
        self._spawned: list[SpawnedWorker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._gateway: Gateway

    async def run(self) -> int:
        """Serves until a signal; returns the exit code. Raises SettingsError before anything is started."""
        listener = bind(self._settings.http)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._gateway = Gateway(self._settings)
        try:
            self._gateway.start()
            for url in self._urls:
                self._gateway.admin.take_in(url)
            self._start_workers()
            return await self._serve(listener)
        finally:
            await asyncio.gather(*(worker.stop(CLOSE_S) for worker in self._spawned))
            for task in self._tasks:
                task.cancel()
            await self._gateway.close()
            listener.close()

    # ---- workers of its own -----------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        settings = _shared_out(self._settings, self._spawn)
        for port in _free_ports(self._spawn):
            worker = self._gateway.admin.take_in(f"http://127.0.0.1:{port}", starting=True)
            spawned = SpawnedWorker(settings, port, self._on_ready(worker), self._on_death(worker))
            self._spawned.append(spawned)
            self._tasks.append(asyncio.create_task(spawned.run()))

    def _on_ready(self, worker: Worker) -> Any:
        return lambda url: self._gateway.health.check_now(worker)

    def _on_death(self, worker: Worker) -> Any:
        def died(starts_again: bool) -> None:
            worker.starting = starts_again
            self._gateway.pool.missed(worker, "its process died", refused=True)
            if all(spawned.exit_code == 2 for spawned in self._spawned) and not self._urls:
                self._failed.set()

        return died

    # ---- serve ------------------------------------------------------------------------------------------------

    async def _serve(self, listener: socket.socket) -> int:
        server = HttpServer(self._gateway.app, self._settings.http)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        settle()
        code = 1
        if await self._workers_ready():
            self._say_ready(listener)
            await first_of(self._stop.wait(), self._failed.wait(), asyncio.shield(serving))
        if not self._failed.is_set():
            await self._drain()
            code = 0
        elif self._spawned and all(spawned.exit_code == 2 for spawned in self._spawned):
            code = 2
        server.should_exit = True
        await serving
        return code

    async def _workers_ready(self) -> bool:
        """Waits until all spawned workers, or without such one worker, can answer; False when a signal comes first."""
        pool = self._gateway.pool
        while True:
            pool.changed.clear()
            states = pool.states()
            if states["idle"] + states["busy"] >= max(1, self._spawn):
                return True
            if await first_of(self._stop.wait(), self._failed.wait(), pool.changed.wait()) != 2:
                return False

    def _say_ready(self, listener: socket.socket) -> None:
        models = sorted({worker.model for worker in self._gateway.pool.workers.values() if worker.model})
        count = len(self._gateway.pool.workers)
        print(
            f"weft gateway ready on {address_of(listener)} (model {', '.join(models)},"
            f" {count} worker{'' if count == 1 else 's'})",
            flush=True,
        )

    async def _drain(self) -> None:
        """Lets what runs end, up to `http.drain_s`; a second signal, or the limit, ends it."""
        limit = self._settings.http.drain_s
        logger.info("draining: no new requests, up to %g s for those that run", limit)
        self._stop.clear()
        if await first_of(self._gateway.drain(), self._stop.wait(), timeout_s=limit) != 0:
            self._gateway.end_all()


def _shared_out(settings: Settings, workers: int) -> Settings:
    """The settings of each of several workers on one machine: those that choose their threads share the processors."""
    if workers < 2:
        return settings
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    backend, replace = settings.backend, msgspec.structs.replace
    if backend.torch.threads == "auto":
        backend = replace(backend, torch=replace(backend.torch, threads=threads))
    if backend.llama_cpp.n_threads == "auto":
        backend = replace(backend, llama_cpp=replace(backend.llama_cpp, n_threads=threads))
    return replace(settings, backend=backend)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on. Somebody else may take one before the worker does, which then says so."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def gateway(settings: Settings, urls: list[str], spawn: int) -> int:
    """Runs a gateway; returns its exit code. Raises SettingsError before anything is started."""
    set_up_logging(settings.log, "gateway")

    async def main() -> int:
        return await GatewayProcess(settings, urls, spawn).run()

    try:
        return run(main())
    finally:
        sys.stdout.flush()
