"""What is alive: /v1/requests, /v1/sessions and /v1/cache. The engine knows most of it.

A request that is open here but not known to the engine yet is being tokenized; it is shown as queued, without tokens.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response

from weft.core.errors import CancelledError, NotFoundError
from weft.server import values
from weft.server.jobs import QUERY_LIMIT_S, Job, Server
from weft.server.wire import to_json

_NO_LEASE = {"tokens": 0, "bytes": 0, "turns": 0, "expires_in_s": None, "last_used_s_ago": None}
"""Of a session whose KV is not kept (any more)."""


async def list_requests(request: Request) -> Response:
    """Live and recent requests, the oldest first."""
    server: Server = request.app.state.server
    answer = await server.ask_engine("requests", QUERY_LIMIT_S)
    known = {record["id"]: record for record in answer["requests"]}
    for job in server.jobs.values():
        for request_id in job.open_ids():
            known.setdefault(request_id, _being_tokenized(job, request_id))
    return _json({"requests": [known[request_id] for request_id in sorted(known)]})


async def get_request(request: Request) -> Response:
    """One request, live or recent: `/v1/requests/17` or `/v1/requests/chatcmpl-17`."""
    server: Server = request.app.state.server
    request_id = values.request_id(request.path_params["request_id"])
    assert request_id is not None
    try:
        return _json(await server.ask_engine("request", QUERY_LIMIT_S, request_id=request_id))
    except NotFoundError:
        job = next((job for job in server.jobs.values() if request_id in job.open_ids()), None)
        if job is None:
            raise
        return _json(_being_tokenized(job, request_id))


async def list_sessions(request: Request) -> Response:
    """Sessions whose KV is kept, and streaming sessions' conversations."""
    server: Server = request.app.state.server
    answer = await server.ask_engine("sessions", QUERY_LIMIT_S)
    known = {session["id"]: session for session in answer["sessions"]}
    for conversation in server.conversations:
        session = known.setdefault(conversation.id, {"id": conversation.id} | _NO_LEASE)
        session["messages"] = len(conversation.messages)
        session["epoch"], session["state"] = conversation.epoch, conversation.state
    return _json({"sessions": list(known.values())})


async def show_cache(request: Request) -> Response:
    """What the KV cache holds, as a tree of numbers."""
    server: Server = request.app.state.server
    return _json(await server.ask_engine("cache", QUERY_LIMIT_S))


async def end_session(request: Request) -> Response:
    """Ends a session: its KV is free to be forgotten, its requests are cancelled, its conversation is forgotten."""
    server: Server = request.app.state.server
    session_id = request.path_params["session_id"]
    ids = [i for job in server.jobs.values() if _is_of(job, session_id) for i in job.open_ids()]
    server.client.abort(ids)  # first, so that a request of it that is still being tokenized does not open it anew
    error = CancelledError("the session was ended")
    forgotten = server.conversations.forget(session_id, error) is not None
    try:
        answer = await server.ask_engine("end_session", QUERY_LIMIT_S, session_id=session_id)
    except NotFoundError:
        if not ids and not forgotten:
            raise
        answer = {"ended": False, "aborted": 0}
    return _json({"id": session_id, "ended": answer["ended"], "aborted": max(answer["aborted"], len(ids))})


def _is_of(job: Job, session_id: str) -> bool:
    return job.session is not None and job.session.id == session_id


def _being_tokenized(job: Job, request_id: int) -> dict[str, Any]:
    age_s = round(time.monotonic() - job.arrival_s, 6)
    return {
        "id": request_id,
        "state": "queued",
        "priority": job.priority,
        "session_id": None if job.session is None else job.session.id,
        "adapter": job.model if job.adapter else None,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "miss": None,
        "chunks": 0,
        "retractions": 0,
        "finish_reason": None,
        "error": None,
        "times": {"queued_s": age_s, "pending_s": 0.0, "processing_s": 0.0},
        "age_s": age_s,
        "kv": {"tokens": 0, "bytes": 0},
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(to_json(document), media_type="application/json")
