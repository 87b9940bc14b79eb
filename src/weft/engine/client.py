"""`EngineClient`: how the API process talks to the text and engine processes.

It gives out request ids, carries deltas to whoever waits for them, and owns one promise: every submitted id yields
exactly one `end`, also when a process dies (`fail`). Used from one event loop only.

A set of children lives between `start` or `reopen` and `fail`. In between, nothing is taken: a request is refused with
what went wrong, or, once `reopen` has been called, with the code "loading".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from weft.core.errors import EngineError, UnavailableError, WeftError
from weft.engine.generation import Generation, OnEnd
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

EngineOp = Literal["stats", "flush_cache", "metrics", "requests", "request", "sessions", "end_session", "cache"]

_RECEIVE_S = 0.005  # before others on the event loop have their turn


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API tells about the model, collected from the children's `Ready` messages.

    `features` are those of the backend, `dimensions` those of an embedding model's vectors.
    """

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
    features: frozenset[str] = frozenset()
    dimensions: int | None = None


class EngineClient:
    """The API's end of all sockets. `start` binds the inbox; `wait_ready` collects every child's `Ready`.

    Attributes:
        last_heartbeat_s: when each child was last heard, by role; on the monotonic clock.
        beat: all that the engine said with its last sign of life.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: zmq.Socket[bytes] | None = None
        self._engine: Outbox
        self._texts: list[Outbox] = []
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._loop: asyncio.AbstractEventLoop
        self._ready: dict[str, dict[str, Any]] = {}
        self._expected: frozenset[str] = frozenset()
        self._all_ready: asyncio.Future[None]
        self._failure: WeftError | None = None
        self._failed = asyncio.Event()
        self._loading = False
        self.last_heartbeat_s: dict[str, float] = {}
        self.beat = Heartbeat("engine")

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self, roles: Collection[str]) -> None:
        """Binds and connects; to be called inside the running event loop, before the children start."""
        self._loop = asyncio.get_running_loop()
        self._open(roles)

    def reopen(self, endpoints: Endpoints, roles: Collection[str]) -> None:
        """After `fail`: makes ready for a new set of children at new addresses, before they start.

        Until all of them are ready, requests are refused with the code "loading". Ids go on where they were.
        """
        assert self._failure is not None, "reopen follows fail"
        self._close_sockets()
        self._endpoints = endpoints
        self._loading = True
        self._failed.clear()
        self._open(roles)

    async def wait_ready(self) -> dict[str, dict[str, Any]]:
        """Role -> facts, once all children are ready. Raises StartError when one could not start."""
        await self._all_ready
        return self._ready

    def fail(self, error: WeftError) -> None:
        """A child is dead: ends everything that is open, and everything that comes, with this error."""
        if self._failure is not None and not self._loading:
            return
        self._failure = error
        self._loading = False
        self._failed.set()
        if not self._all_ready.done():
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
        self._close_sockets()
        self._context.term()

    @property
    def retry_after_s(self) -> float:
        """How long until half of the queue is worked off, as the engine said last."""
        return self.beat.retry_after_s

    @property
    def failure(self) -> WeftError | None:
        """What ended the children; None while they work."""
        return self._failure

    def check_alive(self) -> None:
        """Raises UnavailableError when the children do not work: they are dead, or being started again."""
        if self._failure is None:
            return
        if self._loading:
            text = f"the engine is being started again: {self._failure.message}"
            raise UnavailableError(text, code="loading")
        raise UnavailableError(f"the engine is not available: {self._failure.message}")

    # ---- requests ---------------------------------------------------------------------------------------------

    @property
    def open_ids(self) -> list[int]:
        """All ids that were submitted and have neither ended nor been closed."""
        return list(self._generations)

    @property
    def open_requests(self) -> int:
        return len(self._generations)

    def is_open(self, request_id: int) -> bool:
        return request_id in self._generations

    def new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    def submit(self, *requests: TextRequest, on_end: OnEnd | None = None, at_once: int | None = None) -> Generation:
        """Sends requests on their way; one Generation for all ids.

        Of more requests than `at_once`, of one id each then, the others follow as those before them end. Raises
        UnavailableError when a child is dead. When it raises, nothing is open, and `on_end` is not called.
        """
        self.check_alive()
        now = len(requests) if at_once is None else at_once
        generation = Generation(self, requests[:now], requests[now:], on_end)
        for request_id in generation.request_ids:
            self._generations[request_id] = generation
        try:
            for request in requests[:now]:
                self.send(request)
        except BaseException:
            for request_id in generation.request_ids:
                self.forget(request_id)
            self.abort(generation.request_ids)
            raise
        return generation

    def abort(self, request_ids: list[int] | None) -> None:
        """Ends these requests (None: all that are open) as cancelled; unknown ids are ignored.

        Whoever still waits for a Generation's deltas gets its end from the process that has the request.
        """
        ids = self.open_ids if request_ids is None else request_ids
        if self._failure is not None or not ids:
            return
        message = Abort(ids, sent_s=time.monotonic())
        for outbox in (self._engine, *self._texts):
            outbox.send(message)
        for generation in dict.fromkeys(self._generations[i] for i in ids if i in self._generations):
            generation.drop(ids)

    def send(self, request: TextRequest) -> None:
        """For `Generation`: a request of an open one goes to its text process; to nobody when a child is dead."""
        if self._failure is None:
            self._text_for(request.request_ids[0]).send(request)

    def forget(self, request_id: int) -> None:
        self._generations.pop(request_id, None)

    # ---- questions --------------------------------------------------------------------------------------------

    async def tokenize(self, query: TextQuery) -> dict[str, Any]:
        """Asks a text process (`call_id` is filled in here). Raises the WeftError that it answers with."""
        self.check_alive()
        call_id = next(self._call_ids)
        return await self._call(self._text_for(call_id), call_id, msgspec.structs.replace(query, call_id=call_id))

    async def engine_query(
        self, op: EngineOp, *, request_id: int | None = None, session_id: str | None = None
    ) -> dict[str, Any]:
        """Asks the engine. Raises the WeftError that it answers with."""
        self.check_alive()
        call_id = next(self._call_ids)
        return await self._call(self._engine, call_id, EngineQuery(call_id, op, request_id, session_id))

    async def _call(self, outbox: Outbox, call_id: int, message: object) -> dict[str, Any]:
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._calls[call_id] = future
        try:
            outbox.send(message)
            return await future
        finally:
            del self._calls[call_id]

    # ---- insides ----------------------------------------------------------------------------------------------

    def _open(self, roles: Collection[str]) -> None:
        self._expected = frozenset(roles)
        self._ready = {}
        self._all_ready = self._loop.create_future()
        self.last_heartbeat_s = {}
        self.beat = Heartbeat("engine")
        # Plain sockets: with no high-water mark a send never waits; the inbox is drained when its descriptor says so.
        self._engine = Outbox(self._context, self._endpoints.engine)
        self._texts = [Outbox(self._context, self._endpoints.text(i)) for i in range(self._endpoints.num_text)]
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(self._endpoints.api)
        self._loop.add_reader(self._inbox.fileno(), self._receive, self._inbox)

    def _close_sockets(self) -> None:
        if self._inbox is None:
            return
        self._loop.remove_reader(self._inbox.fileno())
        self._inbox.close(linger=0)
        self._inbox = None
        for outbox in (self._engine, *self._texts):
            outbox.close()

    def _text_for(self, number: int) -> Outbox:
        return self._texts[number % len(self._texts)]

    def _receive(self, inbox: zmq.Socket[bytes]) -> None:
        """Takes what has arrived, so that deltas that wait are merged. The descriptor tells only of news."""
        if inbox is not self._inbox:
            return
        until = time.monotonic() + _RECEIVE_S
        while time.monotonic() < until:
            try:
                data = inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(decode_to_api(data))
            except Exception as error:  # a bug: better to end every request than to hang them all
                self.fail(EngineError(f"the API process could not handle a message: {error!r}"))
        self._loop.call_soon(self._receive, inbox)

    def _dispatch(self, message: object) -> None:
        match message:
            case TextBatch(deltas=deltas):
                for delta in deltas:
                    generation = self._generations.get(delta.request_id)
                    if generation is not None:
                        generation.deliver(delta)
            case QueryReply(call_id=call_id, result=result, error=error):
                self._answer(call_id, result, error)
            case EngineReply(call_id=call_id, result=result, error=error):
                self._answer(call_id, result, error)
            case Heartbeat(role=role):
                self.last_heartbeat_s[role] = time.monotonic()
                if role == "engine":
                    self.beat = message
            case Ready(role=role, facts=facts):
                self._ready[role] = facts
                self.last_heartbeat_s[role] = time.monotonic()
                if self._expected <= self._ready.keys() and not self._all_ready.done():
                    self._failure, self._loading = None, False
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
