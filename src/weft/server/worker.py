"""GET /worker: what a gateway wants to know, in one answer that waits for nobody."""

from __future__ import annotations

from fastapi import Request, Response

import weft
from weft.core.errors import WeftError
from weft.server.jobs import Server
from weft.server.wire import to_json


async def worker(request: Request) -> Response:
    """Who this is, whether it takes requests, how busy it is, and which prompts it holds.

    Numbers of the engine are those of its last heartbeat. 200 also while it takes nothing: `ready` says so.
    """
    server: Server = request.app.state.server
    beat, geometry = server.client.beat, server.facts.geometry
    document = {
        "boot_id": server.boot_id,
        "version": weft.__version__,
        "model": server.facts.served_name,
        "models": server.model_names,
        "backend": server.facts.backend,
        "ready": _ready(server),
        "draining": server.draining,
        "requests": {"total": geometry["max_concurrent_requests"], "used": server.client.open_requests},
        "sessions": {"total": server.settings.http.max_sessions, "used": beat.sessions},
        "queued": beat.queued,
        "wait_s": beat.wait_s,
        "prefill_tokens_per_s": beat.prompt_tokens_per_s,
        "tokens_per_char": server.prefixes.tokens_per_char,
        "prefixes": server.prefixes.report(beat),
        "prefixes_version": server.prefixes.version,
    }
    return Response(to_json(document), media_type="application/json")


def _ready(server: Server) -> bool:
    try:
        server.client.check_alive()
    except WeftError:
        return False
    return not server.draining
