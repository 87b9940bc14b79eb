"""The engine process: `EngineCore` between an inbox and outboxes.

Steps are computed in a thread of their own (`StepRunner`), so the loop is awake while one runs: it takes requests,
cancels, keeps deadlines and answers questions. It sleeps on its inbox, which the step's thread wakes as well; nothing
polls. Its heartbeat comes from the loop itself, so a loop that hangs falls silent; so does it when a step takes longer
than any step should.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from weft.backends.base import Progress
from weft.backends.registry import create_backend
from weft.config.settings import Settings
from weft.core.errors import WeftError
from weft.engine.core import EngineCore
from weft.engine.runner import StepRunner
from weft.ipc.errors import error_info
from weft.ipc.messages import (
    Abort,
    EngineQuery,
    EngineReply,
    Finish,
    Ready,
    Submit,
    ToEngine,
    TokenBatch,
    TokenOutput,
    Wake,
    decode_to_engine,
)
from weft.ipc.sockets import Endpoints, Inbox, Outbox
from weft.launch.garbage import settle
from weft.launch.heartbeat import heartbeat_interval_s

logger = logging.getLogger(__name__)

STEP_LIMIT_HEARTBEATS = 6
"""A step that runs for so many times `engine.heartbeat_s` is taken for hung: the loop then falls silent."""


class EngineProcess:
    """Wires one `EngineCore` to the other processes; `run` returns only by an exception."""

    def __init__(self, settings: Settings, endpoints: Endpoints, context: zmq.Context[Any]) -> None:
        self._core = EngineCore(settings, create_backend(settings))
        self._context = context
        self._endpoints = endpoints
        self._inbox = Inbox(context, endpoints.engine, decode_to_engine)
        self._inbox.bind(endpoints.engine_thread)
        self._runner = StepRunner(self._core.backend, self._make_wake)
        self._api = Outbox(context, endpoints.api)
        self._texts = [Outbox(context, endpoints.text(i)) for i in range(endpoints.num_text)]
        self._reply_to: dict[int, int] = {}
        self._beat_interval_s = heartbeat_interval_s(settings)
        self._beat_due_s = 0.0

    def load(self) -> None:
        """Loads the model and says so. Raises what `EngineCore.load` raises."""
        with _progress_bar() as progress:
            self._runner.call(lambda: self._core.load(progress))
        core = self._core
        self._api.send(
            Ready(
                "engine",
                {
                    "backend": core.backend.name,
                    "description": core.geometry.description,
                    "dtype": core.geometry.dtype,
                    "vocab_size": core.geometry.vocab_size,
                    "max_context_tokens": core.scheduler.max_context_tokens,
                    "kv_tokens": core.scheduler.cache.capacity,
                    "kv_bytes_per_token": core.geometry.kv_bytes_per_token,
                    "num_layers": core.geometry.num_layers,
                    "features": sorted(core.backend.features),
                    "dimensions": core.geometry.dimensions,
                    "max_queue_size": core.scheduler.limits.max_queue_size,
                    "max_concurrent_requests": core.scheduler.limits.max_concurrent_requests,
                },
            )
        )

    def end_recording(self) -> None:
        """Writes what is left of a trace. Called from another thread, just before the process ends."""
        self._core.end_recording()

    def run(self) -> None:
        core, runner = self._core, self._runner
        while True:
            for message in self._inbox.receive(self._idle_s()):
                self._handle(message)
            for landing in runner.take():
                core.land(landing)
            core.tick()
            self._send(core.take_outputs())  # clients first, then the next step
            while len(runner.in_flight) < core.depth and (plan := core.begin()) is not None:
                runner.start(plan)
            for plan in runner.in_flight:
                if not core.scheduler.abandoned(plan):
                    break  # steps end in order: one that is wanted is not to be broken off
                core.backend.cancel(plan.step)
            self._send(core.take_outputs())
            if runner.busy_s() < STEP_LIMIT_HEARTBEATS * core.settings.engine.heartbeat_s:
                self._beat()

    def _make_wake(self) -> Callable[[], None]:
        """Called in the step's thread, for a socket belongs to one thread."""
        outbox = Outbox(self._context, self._endpoints.engine_thread)
        return lambda: outbox.send(Wake())

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._reply_to[message.request_id] = message.reply_to
                self._core.submit(message)
            case Finish(request_id=request_id):
                self._core.complete(request_id)
            case Abort(request_ids=request_ids, sent_s=sent_s):
                self._core.abort(request_ids, sent_s)
            case EngineQuery():
                self._api.send(self._answer(message))
            case Wake():
                pass  # the step is taken from the runner

    def _answer(self, query: EngineQuery) -> EngineReply:
        try:
            return EngineReply(query.call_id, self._ask(query))
        except WeftError as error:
            return EngineReply(query.call_id, error=error_info(error))

    def _ask(self, query: EngineQuery) -> dict[str, Any]:
        core = self._core
        match query.op:
            case "stats":
                return core.stats()
            case "metrics":
                return core.metrics()
            case "flush_cache":
                return {"flushed_tokens": core.flush_cache()}
            case "requests":
                return {"requests": core.requests()}
            case "request":
                return core.request(query.request_id or 0)
            case "sessions":
                return {"sessions": core.sessions()}
            case "end_session":
                return core.end_session(query.session_id or "")
            case "cache":
                return core.cache()

    def _send(self, outputs: list[TokenOutput]) -> None:
        batches: dict[int, list[TokenOutput]] = {}
        for output in outputs:
            batches.setdefault(self._reply_to[output.request_id], []).append(output)
            if output.end is not None:
                del self._reply_to[output.request_id]
        for index, batch in batches.items():
            self._texts[index].send(TokenBatch(batch))

    def _idle_s(self) -> float:
        return max(0.0, min(self._beat_due_s, self._core.due_s) - time.monotonic())

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due_s:
            self._api.send(self._core.beat())
            self._beat_due_s = now + self._beat_interval_s


class _progress_bar:  # noqa: N801 - used like a function
    """A bar on stderr while weights load, where stderr is a terminal; None elsewhere."""

    def __enter__(self) -> Progress | None:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("loading weights"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True
        )
        self._bar.start()
        task = self._bar.add_task("load", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def main(
    settings: Settings, folder: Path, num_text: int, context: zmq.Context[Any], on_end: list[Callable[[], None]]
) -> None:
    """Runs the engine; what has to be done when the process is told to end is added to `on_end`."""
    process = EngineProcess(settings, Endpoints(folder, num_text), context)
    process.load()
    settle()
    on_end.append(process.end_recording)
    process.run()
