"""What a gateway says of itself and of its workers: /workers, /api/queue, /api/routes, /stats, /metrics, and so on.

What each worker has of its own (requests, sessions) is asked of all of them and put together; a worker that does not
answer is left out, and named in `missing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from weft.core.errors import InvalidRequestError, NotFoundError, UnavailableError
from weft.gateway.health import Health
from weft.gateway.pool import Pool, Ticket
from weft.gateway.proxy import Proxy
from weft.gateway.sessions import Sessions
from weft.gateway.upstream import UpstreamError
from weft.gateway.workers import Worker

ANSWER_LIMIT_S = 5.0
MAX_ANSWER_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 16


class Admin:
    """The endpoints."""

    def __init__(self, pool: Pool, health: Health, proxy: Proxy, sessions: Sessions) -> None:
        self._pool = pool
        self._health = health
        self._proxy = proxy
        self._sessions = sessions

    # ---- workers ----------------------------------------------------------------------------------------------

    async def list_workers(self, request: Request) -> Response:
        """All workers, in the order in which they were added."""
        return _json({"workers": [self._shown(worker) for worker in self._pool.workers.values()]})

    async def add_worker(self, request: Request) -> Response:
        """`{"url"}`: takes a worker in; it gets work as soon as it says that it is ready."""
        fields = await _object(request, allowed={"url"})
        url = fields.get("url")
        worker = self.take_in(check_url(url))
        return _json(self._shown(worker), 201)

    async def remove_worker(self, request: Request) -> Response:
        """Takes a worker out: it gets nothing new; what runs on it goes on. By name, or with `{"url"}`."""
        name = request.path_params.get("name")
        if name is None:
            url = check_url((await _object(request, allowed={"url"})).get("url"))
            name = next((w.name for w in self._pool.workers.values() if w.url == url), None)
            if name is None:
                raise NotFoundError(f"url: no worker at {url!r} is known here", param="url")
        worker = self._pool.remove(name)
        self._health.forget(worker)
        return _json({"removed": worker.name, "in_flight": worker.in_flight})

    def take_in(self, url: str, *, starting: bool = False) -> Worker:
        """Raises InvalidRequestError for a worker that is there already."""
        if any(worker.url == url for worker in self._pool.workers.values()):
            raise InvalidRequestError(f"url: {url!r} is a worker here already", param="url")
        worker = self._pool.add(url, starting=starting)
        self._health.watch(worker)
        return worker

    async def of_worker(self, request: Request) -> Response:
        """GET /workers/{name}/…: what one worker says of itself."""
        worker = self._pool.workers.get(request.path_params["name"])
        if worker is None:
            raise NotFoundError(f"no worker {request.path_params['name'][:80]!r} is known here", param="worker")
        path = "/" + request.path_params["path"]
        if path not in ("/stats", "/metrics", "/v1/requests", "/v1/sessions", "/v1/cache", "/worker"):
            raise NotFoundError(f"{path}: not one of the pages of a worker that are shown here")
        status, data, content_type = await self._get(worker, path)
        return Response(data, status, media_type=content_type)

    # ---- the line ---------------------------------------------------------------------------------------------

    async def list_queue(self, request: Request) -> Response:
        """Who waits, the next one first."""
        estimates = self._pool.estimates()
        tickets = self._pool.tickets
        return _json(
            {
                "queue_length": len(tickets),
                "max": self._proxy.max_queue_size,
                "running": len(self._pool.leases),
                "tickets": [self._ticket(t, wait) for t, wait in zip(tickets, estimates, strict=True)],
            }
        )

    async def get_ticket(self, request: Request) -> Response:
        ticket = self._pool.ticket(request.path_params["ticket"])
        return _json(self._ticket(ticket, self._pool.estimates()[ticket.position - 1]))

    async def cancel_ticket(self, request: Request) -> Response:
        """Ends somebody's waiting; they are told."""
        self._pool.cancel(request.path_params["ticket"])
        return _json({"cancelled": request.path_params["ticket"]})

    async def list_routes(self, request: Request) -> Response:
        """The latest decisions, the newest first."""
        return _json({"routes": list(reversed(self._pool.routes)), "counts": dict(self._pool.route_counts)})

    # ---- the whole --------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 while this process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request would get a worker."""
        self._proxy.check_open()
        now = self._pool.clock()
        if not any(worker.usable(now) for worker in self._pool.workers.values()):
            raise UnavailableError("no worker is available", code="no_worker")
        return _json({"status": "ok"})

    async def stats(self, request: Request) -> Response:
        """The workers' snapshots added up, and the gateway's own numbers."""
        answers, missing = await self._ask_all("GET", "/stats")
        total: dict[str, Any] = {}
        for answer in answers.values():
            _add_up(total, answer)
        gateway = {
            "workers": self._pool.states(),
            "queue_length": len(self._pool.tickets),
            "in_flight": len(self._pool.leases),
            "turns": self._sessions.turns,
            "routes": dict(self._pool.route_counts),
            "retries": self._pool.retries,
            "continued": self._pool.continued,
        }
        return _json(total | {"gateway": gateway, "missing": missing})

    async def metrics(self, request: Request) -> Response:
        """The gateway's own; each worker has its own at its own address."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(self._pool))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def requests(self, request: Request) -> Response:
        """Live and recent requests of all workers; `id` is the worker's own."""
        return await self._merged("/v1/requests", "requests")

    async def sessions(self, request: Request) -> Response:
        """Sessions whose KV is kept, of all workers."""
        return await self._merged("/v1/sessions", "sessions")

    async def end_session(self, request: Request) -> Response:
        """Ends a session wherever it is."""
        session_id = request.path_params["session_id"]
        answers, _ = await self._ask_all("DELETE", f"/v1/sessions/{quote(session_id, safe='')}")
        kept = self._sessions.forget(session_id)
        if kept is not None:
            worker, place = kept
            try:
                status, data, _ = await self._get(worker, f"/v1/sessions/{place.id}", "DELETE")
                if status == 200:
                    answers[worker.name] = msgspec.json.decode(data)
            except UnavailableError:  # then it is gone, too
                pass
            finally:
                place.used = False
                self._pool.settle()
        if not answers:
            raise NotFoundError(f"session {session_id[:80]!r} is not known here (any more)", param="session_id")
        ended = any(answer["ended"] for answer in answers.values())
        return _json({"id": session_id, "ended": ended, "aborted": sum(a["aborted"] for a in answers.values())})

    async def flush_cache(self, request: Request) -> Response:
        """Every worker forgets what is not in use."""
        answers, missing = await self._ask_all("POST", "/flush_cache")
        for name in answers:
            if name in self._pool.workers:
                self._pool.workers[name].forget()
        flushed = sum(answer["flushed_tokens"] for answer in answers.values())
        return _json({"flushed_tokens": flushed, "missing": missing})

    async def abort(self, request: Request) -> Response:
        """`{"request_id"}`, by the id that the gateway gave, or `{"all": true}`."""
        fields = await _object(request, allowed={"request_id", "all"})
        request_id, everything = fields.get("request_id"), fields.get("all")
        if (request_id is not None) == bool(everything):
            raise InvalidRequestError(
                'request_id: exactly one of request_id and "all": true is needed', param="request_id"
            )
        return _json({"aborted": self._proxy.abort(None if everything else _id_of(request_id))})

    async def stop_streaming(self, request: Request) -> Response:
        """`{}`: stops the turns of all sessions; `{"session_id"}`: of one."""
        fields = await _object(request, allowed={"session_id"})
        session_id = fields.get("session_id")
        if session_id is not None and not isinstance(session_id, str):
            raise InvalidRequestError(
                f"session_id: {session_id!r:.80} is not allowed (allowed: text)", param="session_id"
            )
        return _json({"stopped": await self._sessions.stop(session_id)})

    # ---- insides ----------------------------------------------------------------------------------------------

    def _shown(self, worker: Worker) -> dict[str, Any]:
        now = self._pool.clock()
        return {
            "name": worker.name,
            "url": worker.url,
            "state": worker.state(now),
            "model": worker.model,
            "slots": {"total": worker.slots, "used": worker.in_flight},
            "sessions": {"total": worker.session_slots, "used": worker.histories},
            "queued": worker.queued,
            "wait_s": round(worker.wait_s, 3),
            "requests": worker.requests_total,
            "hits": worker.hits_total,
            "failures": worker.failures_total,
            "last_error": worker.last_error,
        }

    def _ticket(self, ticket: Ticket, wait_s: float) -> dict[str, Any]:
        return {
            "ticket_id": ticket.id,
            "position": ticket.position,
            "kind": ticket.wanted.kind,
            "waited_s": round(self._pool.clock() - ticket.entered_s, 3),
            "estimated_wait_s": round(wait_s, 3),
        }

    async def _merged(self, path: str, key: str) -> Response:
        answers, missing = await self._ask_all("GET", path)
        items = [{**item, "worker": name} for name, answer in answers.items() for item in answer[key]]
        return _json({key: items, "missing": missing})

    async def _ask_all(self, method: str, path: str) -> tuple[dict[str, Any], list[str]]:
        """The answers by worker, of those that answer 200; the names of those that could not be asked."""
        workers = list(self._pool.workers.values())
        answers = await asyncio.gather(*(self._get(w, path, method) for w in workers), return_exceptions=True)
        found: dict[str, Any] = {}
        missing: list[str] = []
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, UnavailableError):
                missing.append(worker.name)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer[0] == 200:
                found[worker.name] = msgspec.json.decode(answer[1])
            elif answer[0] >= 500:
                missing.append(worker.name)
        return found, missing

    async def _get(self, worker: Worker, path: str, method: str = "GET") -> tuple[int, bytes, str]:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                upstream = self._health.upstreams.get(worker.name)
                if upstream is None:
                    raise UpstreamError("it was removed")
                exchange = await upstream.send(method, path, self._proxy.authorization, b"")
                try:
                    data = await exchange.read_all(MAX_ANSWER_BYTES)
                finally:
                    exchange.close()
        except (UpstreamError, TimeoutError) as error:
            raise UnavailableError(f"worker {worker.name}: {error or 'no answer'}", code="worker_failed") from None
        content_type = next((value.decode() for name, value in exchange.headers if name == b"content-type"), "")
        return exchange.status, data, content_type or "application/octet-stream"


class _Snapshot(Collector):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily("weft_gateway_workers", "Workers by state.", labels=["state"])
        for state, count in self._pool.states().items():
            workers.add_metric([state], count)
        yield workers
        length = GaugeMetricFamily("weft_gateway_queue_length", "Requests and turns that wait for a worker.")
        length.add_metric([], len(self._pool.tickets))
        yield length
        in_flight = GaugeMetricFamily("weft_gateway_in_flight", "Requests and turns that have a worker.")
        in_flight.add_metric([], len(self._pool.leases))
        yield in_flight
        routes = CounterMetricFamily("weft_gateway_route", "Answers by why their worker was chosen.", labels=["reason"])
        for reason, count in self._pool.route_counts.items():
            routes.add_metric([reason], count)
        yield routes
        retries = CounterMetricFamily("weft_gateway_retries", "Times that a request was taken to another worker.")
        retries.add_metric([], self._pool.retries)
        yield retries
        continued = CounterMetricFamily("weft_gateway_continued", "Answers that went on on another worker.")
        continued.add_metric([], self._pool.continued)
        yield continued


def check_url(url: object) -> str:
    """The address of a worker. Raises InvalidRequestError."""
    text = url.rstrip("/") if isinstance(url, str) else ""
    try:
        parts = urlsplit(text)
        good = parts.scheme == "http" and bool(parts.hostname) and not (parts.path or parts.query or parts.username)
        good = good and parts.port is not None
    except ValueError:
        good = False
    if not good:
        raise InvalidRequestError(f"url: {url!r:.200} is not allowed (allowed: http://HOST:PORT)", param="url")
    return text


async def _object(request: Request, *, allowed: set[str]) -> dict[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body is over {MAX_BODY_BYTES} bytes")
    try:
        fields = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    for name in fields.keys() - allowed:
        raise InvalidRequestError(
            f"{name[:80]}: not a parameter of this endpoint", param=name[:80], code="unknown_parameter"
        )
    return fields


def _id_of(value: object) -> int:
    digits = str(value).rpartition("-")[2] if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not digits.isdecimal() or len(digits) > 18:
        text = f'request_id: {value!r:.80} is not allowed (allowed: the integer id or "chatcmpl-17")'
        raise InvalidRequestError(text, param="request_id")
    return int(digits)


def _add_up(total: dict[str, Any], document: dict[str, Any]) -> None:
    """Adds numbers by their place; of what is no number, the first one stays."""
    for key, value in document.items():
        if isinstance(value, dict):
            _add_up(total.setdefault(key, {}), value)
        elif isinstance(value, bool):
            total[key] = total.get(key, True) and value
        elif isinstance(value, int | float):
            total[key] = total.get(key, 0) + value
        else:
            total.setdefault(key, value)


def _json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")
