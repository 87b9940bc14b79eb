"""Every error in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`, with its real status."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from weft.core.errors import EngineError, InvalidRequestError, NotFoundError, QueueFullError, WeftError

log = logging.getLogger("weft.server")


def error_body(error: WeftError) -> bytes:
    """The error as JSON text."""
    fields = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_response(
    error: WeftError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The error as an HTTP answer; a full queue says when to come back."""
    extra = dict(headers or {})
    if isinstance(error, QueueFullError):
        extra["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error_body(error), status or error.http_status, extra, media_type="application/json")


def internal_error(error: BaseException) -> WeftError:
    """What a client is told of a bug of ours; the details are for the log."""
    return EngineError(f"internal error ({type(error).__name__}); the server's log has the details", code="internal")


def install_handlers(app: FastAPI) -> None:
    """Makes every error that leaves an endpoint an answer in OpenAI's form."""

    async def on_weft_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, WeftError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return error_response(NotFoundError(f"there is no {where} here"))
        told = InvalidRequestError(f"{where}: {error.detail}", code=str(error.detail).lower().replace(" ", "_"))
        return error_response(told, status=error.status_code, headers=error.headers)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        return error_response(InvalidRequestError(f"malformed request: {error}"))

    app.add_exception_handler(WeftError, on_weft_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
