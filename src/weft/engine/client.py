"""`EngineClient`: how the API process talks to the text and engine processes.

It gives out request ids, carries deltas to whoever waits for them, and owns one promise: every submitted id yields
exactly one `end`, also when a process dies (`fail`). Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.core.errors import EngineError, UnavailableError, WeftError
from weft.ipc.errors import error_from, error_info
from weft.ipc.messages import (
    Abort,
    End,
    EngineQuery,
    EngineReply,
    ErrorInfo,
    Heartbeat,
    QueryReply,
    Ready,
    StartFailed,
    TextBatch,
    TextDelta,
    TextQuery,
    TextRequest,
    decode_to_api,
)
from weft.ipc.sockets import Endpoints, Outbox


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API tells about the model, collected from the children's `Ready` messages."""

    served_name: str
    backend: str
    description: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    kv_tokens: int
    has_chat_template: bool
    created: int
    geometry: dict[str, Any]


class Generation:
    """The deltas of what was submitted together: iterate until every id has ended; `close` aborts what has not."""

    def __init__(self, client: EngineClient, request_ids: list[int]) -> None:
        self.request_ids = request_ids
        self._client = client
        self._open = dict.fromkeys(request_ids)
        self._queue: asyncio.Queue[TextDelta] = asyncio.Queue()

    def deliver(self, delta: TextDelta) -> None:
        if delta.request_id in self._open:
            self._queue.put_nowait(delta)
            if delta.end is not None:
                del self._open[delta.request_id]
                self._client.forget(delta.request_id)

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        while self._open or not self._queue.empty():
            yield await self._queue.get()

    async def take(self) -> list[TextDelta]:
        """All deltas there are, after waiting for a first one; empty once every id has ended.

        A cancelled wait loses nothing.
        """
        if not self._open and self._queue.empty():
            return []
        deltas = [await self._queue.get()]
        while not self._queue.empty():
            deltas.append(self._queue.get_nowait())
        return deltas

    def close(self) -> None:
        """Idempotent; to be called in a `finally` by whoever submitted."""
        if self._open:
            self._client.abort(list(self._open))
            for request_id in self._open:
                self._client.forget(request_id)
            self._open.clear()


class EngineClient:
    """The API's end of all sockets. `start` binds the inbox; `wait_ready` collects every child's `Ready`."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._context = zmq.asyncio.Context()
        self._inbox: Any = None
        # Plain sockets: with no high-water mark a send never waits, so there is nothing to await.
        plain = zmq.Context.shadow(self._context)
        self._engine = Outbox(plain, endpoints.engine)
        self._texts = [Outbox(plain, endpoints.text(i)) for i in range(endpoints.num_text)]
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._ready: dict[str, dict[str, Any]] = {}
        self._expected: frozenset[str] = frozenset()
        self._all_ready: asyncio.Future[None] | None = None
        self._failure: WeftError | None = None
        self._failed = asyncio.Event()
        self.last_heartbeat_s = time.monotonic()

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self, roles: list[str]) -> None:
        """Binds and connects; to be called inside the running event loop, before the children start."""
        self._expected = frozenset(roles)
        self._all_ready = asyncio.get_running_loop().create_future()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(self._endpoints.api)
        self._receiver = asyncio.create_task(self._receive())

    async def wait_ready(self) -> dict[str, dict[str, Any]]:
        """Role -> facts, once all children are ready. Raises StartError when one could not start."""
        assert self._all_ready is not None
        await self._all_ready
        return self._ready

    def fail(self, error: WeftError) -> None:
        """A child is dead: ends everything that is open, and everything that comes, with this error."""
        if self._failure is not None:
            return
        self._failure = error
        self._failed.set()
        if self._all_ready is not None and not self._all_ready.done():
            self._all_ready.set_exception(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        for request_id, generation in list(self._generations.items()):
            generation.deliver(TextDelta(request_id, end=End("failed", error=error_info(error))))

    async def wait_failure(self, limit_s: float) -> None:
        """Returns when `fail` has been called, or after the limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), limit_s)

    async def close(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
        if self._inbox is not None:
            self._inbox.close(linger=0)
        for outbox in (self._engine, *self._texts):
            outbox.close()
        self._context.term()

    @property
    def failure(self) -> WeftError | None:
        return self._failure

    @property
    def open_requests(self) -> int:
        return len(self._generations)

    # ---- requests ---------------------------------------------------------------------------------------------

    def new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    def submit(self, *requests: TextRequest) -> Generation:
        """Sends requests on their way; one Generation for all ids. Raises UnavailableError when a child is dead."""
        self._check_alive()
        generation = Generation(self, [request_id for request in requests for request_id in request.request_ids])
        for request_id in generation.request_ids:
            self._generations[request_id] = generation
        for request in requests:
            self._text_for(request.request_ids[0]).send(request)
        return generation

    def abort(self, request_ids: list[int] | None) -> None:
        """Ends these requests (None: all) as cancelled; unknown ids are ignored.

        Whoever still iterates over a Generation gets its end from the engine.
        """
        if self._failure is not None:
            return
        for outbox in (self._engine, *self._texts):
            outbox.send(Abort(request_ids))

    def forget(self, request_id: int) -> None:
        self._generations.pop(request_id, None)

    def is_open(self, request_id: int) -> bool:
        return request_id in self._generations

    # ---- questions --------------------------------------------------------------------------------------------

    async def tokenize(self, query: TextQuery) -> dict[str, Any]:
        """Asks a text process (`call_id` is filled in here). Raises the WeftError that it answers with."""
        call_id = next(self._call_ids)
        return await self._call(self._text_for(call_id), call_id, msgspec.structs.replace(query, call_id=call_id))

    async def engine_query(self, op: Any) -> dict[str, Any]:
        """Asks the engine, which answers between two steps."""
        call_id = next(self._call_ids)
        return await self._call(self._engine, call_id, EngineQuery(call_id, op))

    async def _call(self, outbox: Outbox, call_id: int, message: object) -> dict[str, Any]:
        self._check_alive()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            outbox.send(message)
            return await future
        finally:
            del self._calls[call_id]

    # ---- insides ----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise UnavailableError(f"the engine is not available: {self._failure.message}")

    def _text_for(self, number: int) -> Outbox:
        return self._texts[number % len(self._texts)]

    async def _receive(self) -> None:
        while True:
            data = await self._inbox.recv()
            try:
                self._dispatch(decode_to_api(data))
            except Exception as error:  # a bug: better to end every request than to hang them all
                self.fail(EngineError(f"the API process could not handle a message: {error!r}"))

    def _dispatch(self, message: object) -> None:
        match message:
            case TextBatch(deltas=deltas):
                for delta in deltas:
                    generation = self._generations.get(delta.request_id)
                    if generation is not None:
                        generation.deliver(delta)
            case QueryReply(call_id=call_id, result=result, error=error):
                self._answer(call_id, result, error)
            case EngineReply(call_id=call_id, result=result):
                self._answer(call_id, result, None)
            case Heartbeat():
                self.last_heartbeat_s = time.monotonic()
            case Ready(role=role, facts=facts):
                self._ready[role] = facts
                if self._all_ready is not None and self._expected <= self._ready.keys() and not self._all_ready.done():
                    self._all_ready.set_result(None)
            case StartFailed(message=text, exit_code=exit_code):
                self.fail(StartError(text, exit_code=exit_code))

    def _answer(self, call_id: int, result: dict[str, Any], error: ErrorInfo | None) -> None:
        call = self._calls.get(call_id)
        if call is None or call.done():
            return
        if error is not None:
            call.set_exception(error_from(error))
        else:
            call.set_result(result)


class StartError(WeftError):
    """A child could not start; its own words, and the exit code of the whole."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
