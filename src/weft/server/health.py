"""Probes and operation: /health, /ready, /stats, /flush_cache, /abort."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response

from weft.core.errors import InvalidRequestError, NotFoundError, UnavailableError
from weft.server.bodies import read_body
from weft.server.jobs import QUERY_LIMIT_S, Server
from weft.server.schemas import AbortRequest
from weft.server.wire import to_json

FLUSH_LIMIT_S = 30.0


async def health(request: Request) -> Response:
    """200 while all processes live and their loops turn; no token is generated for it."""
    _check_alive(request.app.state.server)
    return _json({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 when a request would be admitted now."""
    server: Server = request.app.state.server
    _check_alive(server)
    server.check_admitting()
    try:
        stats = await server.ask_engine("stats", QUERY_LIMIT_S)
    except UnavailableError:
        _check_alive(server)  # in a long step the engine cannot answer, but a request would wait its turn
        return _json({"status": "ok"})
    queued, places = stats.get("requests", {}).get("queued", 0), server.settings.http.max_queue_size
    if queued >= places:
        raise UnavailableError(f"the queue is full: {queued} of {places} requests wait", code="queue_full")
    return _json({"status": "ok"})


async def stats(request: Request) -> Response:
    """A snapshot of requests, KV cache and engine.

    What the engine cannot see is added here: requests that are being tokenized, and the endings of all requests.
    """
    server: Server = request.app.state.server
    document = await server.ask_engine("stats", QUERY_LIMIT_S)
    document["requests"] = server.states(document["requests"]) | {"finished": server.measures.outcomes}
    document["engine"]["idle"] = document["engine"]["idle"] and not server.client.open_requests
    return _json(document)


async def flush_cache(request: Request) -> Response:
    """Forgets all KV that is not in use."""
    server: Server = request.app.state.server
    answer = await server.ask_engine("flush_cache", FLUSH_LIMIT_S)
    server.prefixes.clear()
    return _json(answer)


async def abort(request: Request) -> Response:
    """Ends one request, with all its choices, or all requests; each client gets its ending."""
    server: Server = request.app.state.server
    body = await read_body(request, AbortRequest)
    if (body.request_id is not None) == bool(body.all):
        raise InvalidRequestError('request_id: exactly one of request_id and "all": true is needed', param="request_id")
    if body.all:
        count = server.client.open_requests
        server.client.abort(None)
        return _json({"aborted": count})
    assert body.request_id is not None
    job = server.jobs.get(body.request_id)
    ids = [body.request_id] if job is None else job.generation.request_ids
    ids = [request_id for request_id in ids if server.client.is_open(request_id)]
    if not ids:
        raise NotFoundError(f"request_id: no request {body.request_id} is running here", param="request_id")
    server.client.abort(ids)
    return _json({"aborted": len(ids)})


def _check_alive(server: Server) -> None:
    """Raises UnavailableError when a process is dead or its loop is silent."""
    server.client.check_alive()
    now = time.monotonic()
    for role, heard_s in server.client.last_heartbeat_s.items():
        if now - heard_s >= server.settings.engine.heartbeat_s:
            text = f"the {role} process has been silent for {now - heard_s:.1f} s"
            raise UnavailableError(text, code="engine_silent")


def _json(document: dict[str, Any]) -> Response:
    return Response(to_json(document), media_type="application/json")
