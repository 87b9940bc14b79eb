"""Turns OpenAI's chat messages into what chat templates expect, without touching the caller's objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from weft.core.errors import InvalidRequestError
from weft.core.media import MODALITIES


class ContentForm(Enum):
    """Which forms of `content` a template takes for a role."""

    TEXT = "strings only"
    BOTH = "strings and lists of parts"
    PARTS = "lists of parts only"


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], content_form: Callable[[str], ContentForm]
) -> list[dict[str, Any]]:
    """Copies of the messages with `content` in the form that `content_form(role)` asks for.

    Text parts that must become one string are joined by newlines, as vLLM does; {"type": "image"} and {"type": "audio"}
    then have no place and are refused, else they go on to the template, in Hugging Face's form.
    `tool_calls[].function.arguments`, JSON text in OpenAI's API, becomes the object that templates expect. Errors:
    `InvalidRequestError` naming the field.
    """
    if not messages:
        raise InvalidRequestError("messages: at least one message is needed", param="messages")
    return [_normalize(index, message, content_form) for index, message in enumerate(messages)]


def _normalize(index: int, message: Mapping[str, Any], content_form: Callable[[str], ContentForm]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where}: must be an object, not {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"{where}.role: must be a string", param=f"{where}.role")
    result = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        if content_form(role) is ContentForm.PARTS:
            result["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, (list, tuple)):
        parts = [_part(part, f"{where}.content[{n}]") for n, part in enumerate(content)]
        if content_form(role) is ContentForm.TEXT:
            _check_only_text(parts, f"{where}.content")
            result["content"] = "\n".join(part["text"] for part in parts)
        else:
            result["content"] = parts
    elif content is not None:
        field = f"{where}.content"
        raise InvalidRequestError(f"{field}: must be a string or a list of parts", param=field)
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _part(part: Any, where: str) -> dict[str, Any]:
    """A copy of a text part, or of the placeholder of an image or a sound, which is its type and nothing else."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in MODALITIES and len(part) == 1:
        return {"type": kind}
    if not isinstance(part, Mapping) or kind != "text":
        raise InvalidRequestError(
            f"{where}.type: {kind!r} is not supported, only 'text' is",
            param=f"{where}.type",
            code="unsupported_content",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text: must be a string", param=f"{where}.text")
    return {"type": "text", "text": text}


def _check_only_text(parts: list[dict[str, Any]], where: str) -> None:
    for n, part in enumerate(parts):
        if part["type"] != "text":
            raise InvalidRequestError(
                f"{where}[{n}]: {part['type']!r} has no place in this model's chat template, which takes text only",
                param=f"{where}[{n}]",
                code="unsupported_content",
            )


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequestError(f"{where}: must be a list", param=where)
    return [_tool_call(call, f"{where}[{n}]") for n, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function: must be an object", param=f"{where}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    field = f"{where}.function.arguments"
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{field}: not valid JSON: {error}", param=field) from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{field}: must be the JSON text of an object", param=field)
    return {**call, "function": {**function, "arguments": parsed}}
