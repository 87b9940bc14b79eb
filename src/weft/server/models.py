"""GET /v1/models, and what no engine provides yet."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from weft.core.errors import NotFoundError
from weft.server.jobs import Server
from weft.server.wire import to_json


def _card(server: Server) -> dict[str, Any]:
    facts = server.facts
    return {
        "id": facts.served_name,
        "object": "model",
        "created": facts.created,
        "owned_by": "weft",
        "max_model_len": facts.max_context_tokens,
    }


async def list_models(request: Request) -> Response:
    """The one model that is served."""
    document = {"object": "list", "data": [_card(request.app.state.server)]}
    return Response(to_json(document), media_type="application/json")


async def get_model(request: Request) -> Response:
    """The model of this name."""
    server: Server = request.app.state.server
    server.check_model(request.path_params["name"])
    return Response(to_json(_card(server)), media_type="application/json")


async def not_provided(request: Request) -> Response:
    """404 with the reason, for endpoints that another engine might have."""
    what = request.url.path.removeprefix("/v1/")
    raise NotFoundError(f"{what}: the {request.app.state.server.facts.backend} engine does not provide it")
