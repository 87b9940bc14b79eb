"""What the generating endpoints have in common: a request is admitted, read, begun and answered, and counts once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from weft.core.errors import WeftError
from weft.server.bodies import read_body
from weft.server.gateways import note_gateway
from weft.server.jobs import Job, Server
from weft.server.schemas import ChatRequest
from weft.server.schemas import Request as Body
from weft.server.streaming import Writer, answer
from weft.web.errors import internal_error

B = TypeVar("B", bound=Body)

Begin = Callable[[Server, Request, B], tuple[Job, Writer]]
"""Starts the job that a checked body asks for. What it raises, it raises before the job has started."""


def generating(schema: type[B], begin: Begin[B], *, embeds: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint for bodies of this schema. `embeds`: what it generates are vectors."""

    async def endpoint(request: Request) -> Response:
        server: Server = request.app.state.server
        try:
            if not embeds:
                note_gateway(request)
            server.check_kind(embeds=embeds)
            server.check_admitting()
            body = await read_body(request, schema)
            server.check_model(body.model)
            if isinstance(body, ChatRequest):
                body = body.model_copy(update={"messages": await server.media.taken(body.messages)})
            job, writer = begin(server, request, body)
        except WeftError as error:
            server.measures.refused(error)
            raise
        except ClientDisconnect:
            raise
        except Exception as error:
            server.measures.refused(internal_error(error))
            raise
        return await answer(job, writer, request.receive, bool(body.stream), server.settings.http.sse_keep_alive_s)

    endpoint.__doc__ = begin.__doc__
    return endpoint
