"""The worker's HTTP app, put together. It starts and stops nothing: processes, signals and sockets are `launch/`'s.

What whoever runs it finds in `app.state`: `draining`, to be set True when nothing new is to be taken (new generation
requests get 503, /ready too); `gate`, whose `wait_idle()` returns once every open HTTP request has had its answer;
`sessions`, the WebSockets, which a drain closes, too; and `server`, what the endpoints share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema

import weft
from weft.config.settings import Settings
from weft.engine.client import EngineClient, ModelFacts
from weft.server import (
    chat,
    completions,
    embeddings,
    generate,
    health,
    live,
    metrics,
    models,
    speech,
    tokenize,
    worker,
)
from weft.server import schemas as s
from weft.server.jobs import Server
from weft.server.session_socket import Sessions, stop_streaming
from weft.web import console
from weft.web.edge import Edge, Gate
from weft.web.errors import install_handlers

Endpoint = Callable[[Request], Awaitable[Response]]

_GET: dict[str, Endpoint] = {
    "/v1/models": models.list_models,
    "/v1/models/{name:path}": models.get_model,
    "/health": health.health,
    "/ready": health.ready,
    "/stats": health.stats,
    "/metrics": metrics.metrics,
    "/v1/requests": live.list_requests,
    "/v1/requests/{request_id}": live.get_request,
    "/v1/sessions": live.list_sessions,
    "/worker": worker.worker,
    "/v1/cache": live.show_cache,
}
_POST: dict[str, tuple[Endpoint, type[s.Body] | None]] = {
    "/v1/chat/completions": (chat.chat_completions, s.ChatRequest),
    "/v1/completions": (completions.completions, s.CompletionRequest),
    "/generate": (generate.generate, s.GenerateRequest),
    "/tokenize": (tokenize.tokenize, s.TokenizeRequest),
    "/detokenize": (tokenize.detokenize, s.DetokenizeRequest),
    "/abort": (health.abort, s.AbortRequest),
    "/flush_cache": (health.flush_cache, None),
    "/v1/embeddings": (embeddings.embeddings, s.EmbeddingRequest),
    "/v1/audio/speech": (speech.speech, s.SpeechRequest),
    "/streaming/stop": (stop_streaming, s.StreamingStopRequest),
}
_DELETE: dict[str, Endpoint] = {
    "/v1/sessions/{session_id:path}": live.end_session,
}
_STREAMING = "/ws/streaming/"
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/v1/embeddings"})
_REF = "#/components/schemas/{model}"


def create_app(
    client: EngineClient, facts: ModelFacts, settings: Settings, speaker: speech.Speaker | None = None
) -> FastAPI:
    """The app over a client whose children are ready. /openapi.json describes it; its /docs would need a CDN.

    `speaker`: what /v1/audio/speech speaks with; without one it is 404.
    """
    app = FastAPI(title="Weft", version=weft.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.draining = False
    app.state.gate = Gate()
    server = app.state.server = Server(client, facts, settings, app.state)
    app.state.speech = speech.Desk(speaker, settings.speech.engine)
    app.state.sessions = Sessions(server, app.state.speech, app.state.gate)
    app.router.add_websocket_route(f"{_STREAMING}{{session_id:path}}", app.state.sessions.endpoint)
    for method, endpoints in (("GET", _GET), ("DELETE", _DELETE)):
        for path, endpoint in endpoints.items():
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
    for path, (endpoint, schema) in _POST.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=_body_of(schema))
    app.router.routes.extend(console.routes())
    install_handlers(app)
    app.add_middleware(
        Edge,
        new_id=lambda: client.new_ids(1)[0],
        gate=app.state.gate,
        max_body_bytes=settings.http.max_body_bytes,
        api_keys=settings.http.api_keys,
        on_refusal=lambda path, error: server.measures.refused(error) if _generates(path) else None,
    )
    _describe_bodies(app)
    return app


def _generates(path: str) -> bool:
    return path in GENERATING or path.startswith(_STREAMING)


def _body_of(schema: type[s.Body] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_bodies(app: FastAPI) -> None:
    """Puts the bodies' schemas into /openapi.json: endpoints read them by hand, so FastAPI does not know them."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        bodies = [(schema, "validation") for _, schema in _POST.values() if schema is not None]
        _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
