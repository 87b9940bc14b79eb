"""GET /v1/models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request, Response

from weft.server.jobs import Server
from weft.server.wire import to_json


def _card(server: Server, name: str) -> dict[str, Any]:
    """`parent` is the model that an adapter belongs to; `root` where its weights come from, as in vLLM's."""
    facts, file = server.facts, server.settings.model.lora.get(name)
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "weft",
        "root": name if file is None else Path(file).name,
        "parent": None if file is None else facts.served_name,
        "max_model_len": facts.max_context_tokens,
    }


async def list_models(request: Request) -> Response:
    """The model that is served, then its LoRA adapters."""
    server: Server = request.app.state.server
    document = {"object": "list", "data": [_card(server, name) for name in server.model_names]}
    return Response(to_json(document), media_type="application/json")


async def get_model(request: Request) -> Response:
    """The model or adapter of this name."""
    server: Server = request.app.state.server
    name = request.path_params["name"]
    server.check_model(name)
    return Response(to_json(_card(server, name)), media_type="application/json")
