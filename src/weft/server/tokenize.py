"""POST /tokenize and /detokenize; the text process answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import Request, Response

from weft.core.errors import DeadlineError, InvalidRequestError
from weft.ipc.messages import TextQuery
from weft.server.bodies import read_body
from weft.server.chat import template_kwargs
from weft.server.jobs import Server
from weft.server.media import without_samples
from weft.server.schemas import DetokenizeRequest, TokenizeRequest
from weft.server.wire import to_json


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a chat."""
    server: Server = request.app.state.server
    body = await read_body(request, TokenizeRequest)
    server.check_model(body.model)
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        param = given[-1] if given else "prompt"
        text = f"{param}: exactly one of prompt, text and messages is needed"
        raise InvalidRequestError(text, param=param)
    messages, media = None, []
    if body.messages is not None:
        messages, media = without_samples(await server.media.taken(body.messages))
    query = TextQuery(
        0,
        "tokenize",
        text=body.prompt if body.text is None else body.text,
        messages=messages,
        add_special_tokens=body.add_special_tokens is not False,
        template_kwargs=template_kwargs(body.add_generation_prompt, body.chat_template_kwargs),
        media=media,
    )
    if body.messages is None and query.template_kwargs:
        raise InvalidRequestError("messages: a chat template's parameters need messages", param="messages")
    if body.messages is not None and body.add_special_tokens is not None:
        text = "add_special_tokens: with messages the chat template alone decides on special tokens"
        raise InvalidRequestError(text, param="add_special_tokens")
    reply = await _ask(server, query)
    document = {
        "count": reply["count"],
        "max_model_len": server.facts.max_context_tokens,
        "tokens": msgspec.Raw(reply["tokens"]),
    }
    if body.return_token_strs:
        document["token_strs"] = msgspec.Raw(reply["pieces"])
    return Response(to_json(document), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    server: Server = request.app.state.server
    body = await read_body(request, DetokenizeRequest)
    server.check_model(body.model)
    server.check_token_ids(body.tokens, "tokens")
    reply = await _ask(server, TextQuery(0, "detokenize", token_ids=body.tokens))
    return Response(to_json({"prompt": reply["text"], "text": reply["text"]}), media_type="application/json")


async def _ask(server: Server, query: TextQuery) -> dict[str, Any]:
    limit_s = server.settings.http.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await server.client.tokenize(query)
    except TimeoutError:
        raise DeadlineError(f"no answer from the tokenizer within {limit_s:g} s") from None
