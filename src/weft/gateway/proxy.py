"""Carries one HTTP request to a worker and its answer back, as it comes.

Invariants: a lease is held exactly while a worker works on the request; nothing of an answer is kept but what is on its
way, and the token ids of a stream. A request of whose answer nothing has left is taken to another worker when its own
fails, `gateway.retries` times at most; a stream of one choice that has begun goes on on another one, which is given
the tokens so far; any other ends with one `error` event, or, where that has no form, a cut connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets

import msgspec
from starlette.datastructures import Headers as StarletteHeaders
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from weft.config.settings import Settings
from weft.core.errors import CancelledError, DeadlineError, NotFoundError, UnavailableError, WeftError
from weft.gateway.asked import KINDS, Asked, look_into
from weft.gateway.events import EventReader
from weft.gateway.health import Health
from weft.gateway.pool import Lease, Pool, Ticket
from weft.gateway.routing import Wanted
from weft.gateway.upstream import Exchange, Headers, UpstreamError
from weft.gateway.workers import Worker
from weft.web.edge import REQUEST_ID
from weft.web.errors import error_body, log
from weft.web.frames import SESSION_ID
from weft.web.gone import ClientGone, unless_gone

KEEP_ALIVE = b": keep-alive\n\n"
SMALL_ANSWER_BYTES = 1 << 20
"""Documents up to this size are read whole before they are passed on, so that another worker can still take over."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade".split()
)
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-weft-gateway", b"x-request-id"}
_NOT_PASSED_BACK = _HOP_BY_HOP | {b"x-request-id", b"date", b"server", b"x-weft-worker-request-id"}
_EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class WorkerFailed(Exception):
    """The worker could not do it, through no fault of the request. `lost`: it seems to be dead; `full`: only full."""

    def __init__(self, reason: str, *, lost: bool = False, full: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost
        self.full = full


class Proxy:
    """What all requests of one gateway share."""

    def __init__(self, pool: Pool, health: Health, settings: Settings) -> None:
        self.pool = pool
        self.health = health
        self.retries = settings.gateway.retries
        self.max_queue_size = settings.gateway.max_queue_size
        self.max_body_bytes = settings.http.max_body_bytes
        self.keep_alive_s = settings.http.sse_keep_alive_s
        self.queue_timeout_s = settings.http.queue_timeout_s
        self.authorization = health.authorization
        self.draining = False
        self._open: dict[int, _Request] = {}

    def check_open(self) -> None:
        """Raises UnavailableError when nothing new is taken."""
        if self.draining:
            raise UnavailableError("the gateway is shutting down and takes no new requests", code="draining")

    async def generating(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI app of the endpoints that take a slot."""
        self.check_open()
        body = await _body(receive)
        request_id = scope[REQUEST_ID]
        request = self._open[request_id] = _Request(self, scope, body, send)
        try:
            await unless_gone(receive, request.run())
        finally:
            del self._open[request_id]
            request.close()

    async def passing(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI app of endpoints that any worker answers, without a slot and without waiting."""
        body = await _body(receive)
        await unless_gone(receive, self._pass(scope, body, send))

    def abort(self, request_id: int | None) -> int:
        """Ends one request, or all (None); how many. Raises NotFoundError."""
        if request_id is not None and request_id not in self._open:
            raise NotFoundError(f"request_id: no request {request_id} is running here", param="request_id")
        found = list(self._open.values()) if request_id is None else [self._open[request_id]]
        for request in found:
            request.abort()
        return len(found)

    def send_on(self, scope: Scope) -> Headers:
        """A client's headers for the worker."""
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT_ON]
        if self.authorization:
            headers = [(name, value) for name, value in headers if name != b"authorization"] + self.authorization
        return headers

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        tried: set[str] = set()
        out = _Out(send)
        while True:
            worker = self._least_loaded(tried)
            tried.add(worker.name)
            upstream = self.health.upstreams[worker.name]
            try:
                exchange = await upstream.send(scope["method"], target(scope), self.send_on(scope), body)
                try:
                    await _pass_back(exchange, out, [(b"x-weft-route", f"{worker.name}; reason=any".encode())])
                finally:
                    exchange.close()
                return
            except UpstreamError as error:
                self.pool.check_now(worker)
                if out.started:
                    raise
                if len(tried) > self.retries or len(tried) >= len(self.pool.workers):
                    raise UnavailableError(f"worker {worker.name}: {error}", code="worker_failed") from None
                self.pool.retries += 1

    def _least_loaded(self, tried: set[str]) -> Worker:
        now = self.pool.clock()
        usable = [w for w in self.pool.workers.values() if w.usable(now) and w.name not in tried]
        if not usable:
            raise UnavailableError("no worker is available", code="no_worker")
        return min(usable, key=lambda worker: (worker.load, worker.order))


class _Out:
    """The way back to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.finished = False

    async def start(self, status: int, headers: Headers) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def data(self, data: bytes, *, last: bool = False) -> None:
        self.finished = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


class _Request:
    """One request on its way, through as many workers as it takes."""

    def __init__(self, proxy: Proxy, scope: Scope, body: bytes, send: Send) -> None:
        self._proxy = proxy
        self._pool = proxy.pool
        self._scope = scope
        self._body = body
        self._out = _Out(send)
        self._kind = KINDS[scope["path"]]
        self._asked: Asked = look_into(self._kind, body, proxy.pool.models)
        session = StarletteHeaders(scope=scope).get("x-session-id")
        self._wanted = Wanted(
            self._kind,
            session=session
            if session is not None and SESSION_ID.fullmatch(session)
            else None,  # the worker refuses others
            digests=self._asked.digests,
            length=self._asked.length,
            ids=self._asked.ids,
        )
        self._seed = secrets.randbits(53)
        self._ticket: Ticket | None = None
        self._lease: Lease | None = None
        self._working: asyncio.Task[None] | None = None
        self._aborted = False
        self._streams = self._asked.stream  # or so its answer says
        self._cut = False
        self._begun = False  # the client has seen some of the answer
        self._tokens: list[int] = []
        self._created: int | None = None

    def close(self) -> None:
        """Gives back what it still holds; idempotent."""
        if self._ticket is not None:
            self._pool.leave(self._ticket)
        if self._lease is not None:
            self._lease.release(ok=False)

    def abort(self) -> None:
        """Somebody else wants it to end; its client is told."""
        self._aborted = True
        if self._working is not None:
            self._working.cancel()

    async def run(self) -> None:
        """The whole way. Raises WeftError while the client can still be told properly."""
        self._working = asyncio.current_task()
        try:
            try:
                await self._tries()
            except asyncio.CancelledError:
                if not self._aborted:
                    raise
                raise CancelledError("the request was aborted") from None
        except WeftError as error:
            if not self._out.started:
                raise
            if not self._streams:
                raise BrokenOff(error.message) from error
            await self._out.data(b"event: error\ndata: " + error_body(error) + b"\n\n", last=True)

    async def _tries(self) -> None:
        for attempt in range(self._proxy.retries + 1):
            lease = await self._get_lease(first=attempt > 0)
            try:
                await self._on_worker(lease)
                return
            except WorkerFailed as error:
                lease.release(ok=False)
                if not error.full:
                    self._pool.failed(lease, str(error), lost=error.lost)
                self._wanted.avoid.add(lease.worker.name)
                reason = f"worker {lease.worker.name}: {error}"
            finally:
                lease.release(ok=False)
            if self._cut or (self._begun and not self._asked.continued):
                raise UnavailableError(f"{reason}; this answer cannot be continued", code="worker_failed")
            if attempt < self._proxy.retries:
                self._pool.retries += 1
                log.info("request %d: another worker is tried: %s", self._scope[REQUEST_ID], reason)
        raise UnavailableError(reason, code="worker_failed")

    async def _get_lease(self, *, first: bool) -> Lease:
        """Waits in the line. A stream that waits for long gets its headers, and then comments."""
        self._ticket = ticket = self._pool.enter(self._wanted, first=first)
        limit_s = self._proxy.queue_timeout_s
        try:
            async with asyncio.timeout(None if first else limit_s):
                while not ticket.lease.done() and self._asked.stream:
                    await asyncio.wait((ticket.lease,), timeout=self._proxy.keep_alive_s)
                    if not ticket.lease.done():
                        await self._out.start(200, _EVENT_HEADERS)
                        await self._out.data(KEEP_ALIVE)
                await asyncio.wait((ticket.lease,))  # not the future itself: whoever is cancelled would cancel it
                lease = ticket.lease.result()
        except TimeoutError:
            raise DeadlineError(f"no worker had room within {limit_s:g} s (http.queue_timeout_s)") from None
        self._ticket, self._lease = None, lease
        return lease

    async def _on_worker(self, lease: Lease) -> None:
        """Raises WorkerFailed."""
        upstream = self._proxy.health.upstreams.get(lease.worker.name)
        if upstream is None:
            raise WorkerFailed("it was removed")
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(None) as limit:
                lease.on_expire = lambda: limit.reschedule(asyncio.get_running_loop().time())
                exchange = await upstream.send("POST", target(self._scope), self._headers(lease), self._present_body())
                lease.begun()
                await self._answer(lease, exchange)
        except UpstreamError as error:
            raise WorkerFailed(str(error), lost=True) from None
        except TimeoutError:
            if lease.client_stalled:
                raise ClientGone from None  # as good as gone: it does not take its answer
            raise WorkerFailed("no sign of life within gateway.worker_lease_s") from None
        finally:
            if exchange is not None:
                exchange.close()

    def _headers(self, lease: Lease) -> Headers:
        said = f"id={self._scope[REQUEST_ID]}, seed={self._seed}, route={lease.worker.name}:{lease.reason}"
        return [*self._proxy.send_on(self._scope), (b"x-weft-gateway", said.encode())]

    def _present_body(self) -> bytes:
        """The client's, or for a stream that goes on the same with what it has so far."""
        if not self._begun:
            return self._body
        fields = msgspec.json.decode(self._body)
        fields["weft_resume"] = {"token_ids": self._tokens, "created": self._created}
        self._pool.continued += 1
        return msgspec.json.encode(fields)

    async def _answer(self, lease: Lease, exchange: Exchange) -> None:
        if exchange.status == 503:
            data = await exchange.read_all(SMALL_ANSWER_BYTES)
            raise WorkerFailed(f"it answered 503: {data[:200].decode(errors='replace')}", lost=True)
        if exchange.status == 429 and any(w.room(self._pool.clock(), turn=False) for w in self._others(lease)):
            raise WorkerFailed("its queue is full", full=True)
        route = f"{lease.worker.name}; reason={lease.reason}; known={lease.choice.known}; waited_s={lease.waited_s:.3f}"
        extra = [(b"x-weft-route", route.encode())]
        if exchange.status == 200 and _is_event_stream(exchange):
            self._streams = True
            await self._events(lease, exchange, extra)
        elif self._out.started:
            data = await exchange.read_all(SMALL_ANSWER_BYTES)  # an error, and the headers have left
            await self._out.data(b"event: error\ndata: " + data + b"\n\n", last=True)
        else:
            try:
                await _pass_back(exchange, self._out, extra, lease)
            finally:
                self._cut = self._out.started  # should it break off now, there is no way to go on
        ok = exchange.status == 200
        if ok or exchange.status < 500:
            lease.worker.succeeded()
        self._pool.counted(lease, lease.reason)
        lease.release(ok=ok)

    def _others(self, lease: Lease) -> list[Worker]:
        return [w for w in self._pool.workers.values() if w is not lease.worker and w.name not in self._wanted.avoid]

    async def _events(self, lease: Lease, exchange: Exchange, extra: Headers) -> None:
        reader = EventReader(hold=self._asked.continued)
        await self._out.start(200, _passed_back(exchange.headers) + extra)
        try:
            while data := await _read_on(exchange, reader):
                passed = reader.feed(data)
                if not passed:
                    lease.touch()
                else:
                    if reader.begun and not self._begun:
                        self._begun, self._created = True, _created(passed)
                    with lease.to_client:
                        await self._out.data(passed)
                if reader.failure is not None:
                    raise WorkerFailed(reader.failure, lost=True)
        finally:
            self._tokens += reader.token_ids()
        if not reader.done:
            raise WorkerFailed("its stream ended without an end", lost=True)
        await self._out.data(b"", last=True)


class BrokenOff(Exception):
    """An answer broke off after its headers had left: the connection has to be cut."""


async def _read_on(exchange: Exchange, reader: EventReader) -> bytes:
    """What comes next of a stream; nothing at its end, however it comes."""
    try:
        return await exchange.read()
    except UpstreamError:
        if reader.done:
            return b""
        raise


async def _pass_back(exchange: Exchange, out: _Out, extra: Headers, lease: Lease | None = None) -> None:
    """The answer as it is. Small ones are whole before anything leaves. Raises UpstreamError."""
    headers = _passed_back(exchange.headers) + extra
    length = next((int(value) for name, value in exchange.headers if name == b"content-length"), None)
    if length is not None and length <= SMALL_ANSWER_BYTES:
        data = await exchange.read_all()
        await out.start(exchange.status, headers)
        await out.data(data, last=True)
        return
    data = await exchange.read()
    await out.start(exchange.status, headers)
    while data:
        with contextlib.nullcontext() if lease is None else lease.to_client:
            await out.data(data)
        data = await exchange.read()
        if lease is not None:
            lease.touch()
    await out.data(b"", last=True)


def _passed_back(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name not in _NOT_PASSED_BACK]


def _is_event_stream(exchange: Exchange) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in exchange.headers)


def _created(event: bytes) -> int | None:
    """When the answer began, as its first chunk says."""
    found = re.search(rb'"created": ?(\d{1,18})', event)
    return int(found[1]) if found else None


def target(scope: Scope) -> str:
    """Path and query as they came."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (raw.partition(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1")


async def _body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)
