"""The engine process: `EngineCore` between an inbox and outboxes.

The loop sleeps on its inbox while there is nothing to do, and takes what has arrived between two steps otherwise. Its
heartbeat comes from the loop itself, so a loop that hangs falls silent.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from weft.backends.base import Progress
from weft.backends.registry import create_backend
from weft.config.settings import Settings
from weft.engine.core import EngineCore
from weft.ipc.messages import (
    Abort,
    EngineQuery,
    EngineReply,
    Finish,
    Heartbeat,
    Ready,
    Submit,
    TokenBatch,
    TokenOutput,
    decode_to_engine,
)
from weft.ipc.sockets import Endpoints, Inbox, Outbox

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0


class EngineProcess:
    """Wires one `EngineCore` to the other processes; `run` returns only by an exception."""

    def __init__(self, settings: Settings, endpoints: Endpoints, context: zmq.Context[Any]) -> None:
        self._core = EngineCore(settings, create_backend(settings))
        self._inbox = Inbox(context, endpoints.engine, decode_to_engine)
        self._api = Outbox(context, endpoints.api)
        self._texts = [Outbox(context, endpoints.text(i)) for i in range(endpoints.num_text)]
        self._reply_to: dict[int, int] = {}
        self._beat_due_s = 0.0

    def load(self) -> None:
        """Loads the model and says so. Raises what `EngineCore.load` raises."""
        with _progress_bar() as progress:
            self._core.load(progress)
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
                },
            )
        )

    def run(self) -> None:
        while True:
            for message in self._inbox.receive(0.0 if self._core.has_work else self._idle_s()):
                self._handle(message)
            self._send(self._core.step() if self._core.has_work else self._core.take_outputs())
            self._beat()

    def _handle(self, message: Submit | Finish | Abort | EngineQuery) -> None:
        match message:
            case Submit():
                self._reply_to[message.request_id] = message.reply_to
                self._core.submit(message)
            case Finish(request_id=request_id):
                self._core.complete(request_id)
            case Abort(request_ids=request_ids):
                self._core.abort(request_ids)
            case EngineQuery(call_id=call_id, op="stats"):
                self._api.send(EngineReply(call_id, self._core.stats()))
            case EngineQuery(call_id=call_id):
                self._api.send(EngineReply(call_id, {"flushed_tokens": self._core.flush_cache()}))

    def _send(self, outputs: list[TokenOutput]) -> None:
        batches: dict[int, list[TokenOutput]] = {}
        for output in outputs:
            batches.setdefault(self._reply_to[output.request_id], []).append(output)
            if output.end is not None:
                del self._reply_to[output.request_id]
        for index, batch in batches.items():
            self._texts[index].send(TokenBatch(batch))

    def _idle_s(self) -> float:
        return max(0.0, self._beat_due_s - time.monotonic())

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due_s:
            self._api.send(Heartbeat("engine", self._core.scheduler.steps))
            self._beat_due_s = now + HEARTBEAT_INTERVAL_S


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


def main(settings: Settings, folder: Path, num_text: int, context: zmq.Context[Any]) -> None:
    process = EngineProcess(settings, Endpoints(folder, num_text), context)
    process.load()
    process.run()
