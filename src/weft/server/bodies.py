"""Reads a JSON body into its schema. Every fault becomes a 400 that names the field, or for bad JSON the position.

Decoding holds Python's lock, so it would hold up every stream of this process: only small bodies are decoded here, the
others by helper processes (`readers`).
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pydantic

from weft.core.errors import InvalidRequestError
from weft.server.schemas import NEUTRAL_ONLY, Body

if TYPE_CHECKING:
    from fastapi import Request

    from weft.server.jobs import Server

M = TypeVar("M", bound=Body)

INLINE_BYTES = 128 * 1024
MAX_COMMAS = 1_000_000
"""Every further value of a list or an object needs a comma; a text with so many is longer than any context."""

_SHOWN_CHARS = 60


async def read_body(request: Request, schema: type[M]) -> M:
    """The request's body as `schema`. Raises InvalidRequestError, BodyTooLargeError."""
    server: Server = request.app.state.server
    chunks = [chunk async for chunk in request.stream()]
    if sum(map(len, chunks)) > INLINE_BYTES:
        return await server.readers.parse(chunks, schema)
    return parse_body(b"".join(chunks), schema, server.facts.max_context_tokens)


def parse_body(data: bytes, schema: type[M], max_context_tokens: int) -> M:
    """`data` as `schema`, without token ids that no context holds. Raises InvalidRequestError."""
    noun = schema.noun
    if not data:
        raise InvalidRequestError(f"the {noun} is empty: a JSON object is needed", code="invalid_json")
    if data.count(b",") > MAX_COMMAS:
        raise InvalidRequestError(f"the {noun} holds more than {MAX_COMMAS} commas: too much for one request")
    try:
        fields = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequestError(f"the {noun} is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        text = str(error)
        where = "" if "byte" in text else f" (byte {len(data)})"
        raise InvalidRequestError(f"the {noun} is not valid JSON: {text}{where}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the {noun} must be a JSON object", code="invalid_json")
    schema = schema.of(fields)
    _refuse_unknown(fields, schema)
    try:
        body = schema.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _named(error) from None
    for name, ids in body.token_ids():
        most = max_context_tokens - schema.reserved_tokens
        if len(ids) > most:
            raise InvalidRequestError(
                f"{name}: it has {len(ids)} tokens, but at most {most} are allowed"
                f" (context {max_context_tokens} tokens)",
                param=name.partition("[")[0],
                code="context_length_exceeded",
            )
    return body


def _refuse_unknown(fields: dict[str, Any], schema: type[Body]) -> None:
    for name in fields:
        if name not in schema.model_fields:
            shown = name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "…"
            raise InvalidRequestError(
                f"{shown}: not a parameter of this endpoint in this version", param=shown, code="unknown_parameter"
            )


def _named(error: pydantic.ValidationError) -> InvalidRequestError:
    """The first complaint as our error: names the field, the value and what is allowed."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = first["loc"]
    param = str(path[0])
    for step in path[1:]:  # deeper only into objects: unions add steps that are no field's name
        if not isinstance(step, str) or not step.isidentifier() or param.partition(".")[0] in NEUTRAL_ONLY:
            break
        param += f".{step}"
    if first["type"] == "missing":
        return InvalidRequestError(f"{param}: this field is needed", param=param, code="missing_parameter")
    if first["type"] == "extra_forbidden":
        text = f"{param}: not a parameter of this endpoint in this version"
        return InvalidRequestError(text, param=param, code="unknown_parameter")
    if first["type"] == "none_required" or param in NEUTRAL_ONLY:
        neutral = NEUTRAL_ONLY.get(param, "null")
        text = f"{param}: not supported in this version (allowed: {neutral})"
        return InvalidRequestError(text, param=param, code="unsupported_parameter")
    allowed = first["msg"].removeprefix("Input ")
    return InvalidRequestError(f"{param}: {reprlib.repr(first['input'])} is not allowed ({allowed})", param=param)
