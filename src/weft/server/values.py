"""Hand-made checks of fields with long or mixed lists; each stops at the first fault and names its place.

All raise InvalidRequestError. What they let through is bounded in its number of objects, because it is packed and
unpacked on its way to the text process, in one go.
"""

from __future__ import annotations

import base64
import re
import reprlib
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from weft.core.errors import InvalidRequestError
from weft.core.plan import Float32s
from weft.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from weft.media.messages import with_parts
from weft.media.parts import PART_TYPES

MAX_PROMPTS = 256
MAX_INPUTS = 2048  # of one request for embeddings; OpenAI's limit
MAX_MESSAGES = 10_000
MAX_PARTS = 20_000  # of the contents of all messages
MAX_FREE_VALUES = 20_000  # in all tool calls of a chat, or in template variables
MAX_DEPTH = 32
MAX_VOICE_S, VOICE_RATE = 30, 16_000  # of a voice to be imitated: seconds, samples a second
MAX_TOKEN_ID = 2**31 - 1

ROLES = ("system", "developer", "user", "assistant", "tool")
_NULL_ONLY = ("refusal", "audio", "annotations", "function_call")  # in every message that the openai package dumps
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *_NULL_ONLY})
_PUBLIC_ID = re.compile(r"(?:(?:chatcmpl|cmpl|gen)-)?([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in exactly one of its three forms; in `messages` media are `MediaItem`s."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request; `many`: they came as a list, and so goes the answer."""

    items: list[Prompt]
    many: bool


def refuse(param: str, value: object, allowed: str, where: str | None = None) -> NoReturn:
    """`where`: the place in `param`."""
    raise InvalidRequestError(
        f"{where or param}: {reprlib.repr(value)} is not allowed (allowed: {allowed})", param=param
    )


def prompts(value: Any) -> list[Prompt]:
    """`prompt` of /v1/completions: text or token ids, one or a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        return _texts(value, "prompt").items
    if isinstance(value, list):
        return _id_lists(value, "prompt").items
    refuse("prompt", value, "text, token ids, or a list of either")


def embedding_inputs(value: Any) -> Prompts:
    """`input` of /v1/embeddings: text or token ids, one or a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        return _texts(value, "input", MAX_INPUTS)
    if isinstance(value, list):
        return _id_lists(value, "input", MAX_INPUTS)
    refuse("input", value, "text, token ids, or a list of either")


def texts(value: Any) -> Prompts | None:
    """`text` of /generate."""
    return None if value is None else _texts(value, "text")


def input_ids(value: Any) -> Prompts | None:
    """`input_ids` of /generate."""
    return None if value is None else _id_lists(value, "input_ids")


def tokens(value: Any) -> list[int]:
    """`tokens` of /detokenize; none is a valid number of tokens there."""
    return _ids(value, "tokens") if value != [] else []


def session_resumed(value: Any) -> list[int]:
    """`token_ids` of a session's `resume`."""
    return _ids(value, "resume.token_ids") if value != [] else []


def resumed(value: Any) -> list[int]:
    """`token_ids` of `weft_resume`; none where an answer has begun without a token."""
    return _ids(value, "weft_resume", "weft_resume.token_ids") if value != [] else []


def stop_strings(value: Any) -> tuple[str, ...]:
    """`stop`: a string, a list of strings, or null."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        refuse("stop", value, "a string or a list of strings")
    for text in value:
        if not isinstance(text, str):
            refuse("stop", text, "a string or a list of strings")
    return tuple(value)


def stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None or value == []:
        return ()
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        refuse("stop_token_ids", f"{len(value)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    return tuple(_ids(value, "stop_token_ids"))


def logit_bias(value: Any) -> dict[int, float]:
    """`logit_bias`: token id, as JSON's keys have it in a string, to a number."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("logit_bias", value, "an object from token id to number")
    if len(value) > MAX_LOGIT_BIAS:
        refuse("logit_bias", f"{len(value)} entries", f"at most {MAX_LOGIT_BIAS}")
    result: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) > MAX_TOKEN_ID:
            refuse("logit_bias", key, "token ids as keys")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            refuse("logit_bias", bias, "numbers as values")
        result[int(key)] = float(bias) if abs(bias) <= 100 else 101.0  # any number over the limit is refused later
    return result


def template_kwargs(value: Any) -> dict[str, Any]:
    """`chat_template_kwargs`: further variables for the chat template."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("chat_template_kwargs", value, "an object")
    if "add_generation_prompt" in value:
        text = "chat_template_kwargs: add_generation_prompt is a parameter of its own"
        raise InvalidRequestError(text, param="chat_template_kwargs")
    _check_free(value, "chat_template_kwargs", 0)
    return value


def speech_format(value: Any) -> str:
    """`response_format` of /v1/audio/speech."""
    if value is None:
        return "wav"
    if value not in ("wav", "pcm"):
        refuse("response_format", value, "wav, pcm")
    return str(value)


def request_id(value: Any) -> int | None:
    """`request_id` of /abort: 17, "17" or "chatcmpl-17"."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    match = _PUBLIC_ID.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        refuse("request_id", value, 'the integer id or "chatcmpl-17"')
    return int(match.group(1))


def messages(value: Any) -> list[dict[str, Any]]:
    """`messages`, with null fields left out and `developer` renamed to `system`, as templates know it.

    Images and sounds have become `MediaPart`s, well-formed but not decoded: `MediaDesk.taken` goes on with them.
    """
    if not isinstance(value, list):
        refuse("messages", value, "a list of messages")
    if not value:
        raise InvalidRequestError("messages: at least one message is needed", param="messages")
    if len(value) > MAX_MESSAGES:
        refuse("messages", f"{len(value)} messages", f"at most {MAX_MESSAGES}")
    parts = free_values = 0
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        _check_message(message, where)
        content, calls = message.get("content"), message.get("tool_calls")
        parts += len(content) if isinstance(content, list) else 0
        if parts > MAX_PARTS:
            refuse("messages", f"more than {MAX_PARTS} content parts", f"at most {MAX_PARTS}")
        if calls:
            free_values = _check_free(calls, f"{where}.tool_calls", free_values)
    return with_parts([_normal(message) for message in value])


def more_messages(value: Any) -> list[dict[str, Any]]:
    """`messages` of a prefill; none is valid there, after others."""
    return messages(value) if value != [] else []


def voice_sample(value: Any) -> Float32s | None:
    """`tts_ref_audio_base64`: float32 [samples], mono, at VOICE_RATE."""
    name = "tts_ref_audio_base64"
    if value is None:
        return None
    most = 4 * VOICE_RATE * MAX_VOICE_S
    allowed = f"base64 of little-endian float32 samples, mono, {VOICE_RATE} Hz, at most {MAX_VOICE_S} s"
    if not isinstance(value, str) or not value:
        refuse(name, value, allowed)
    if len(value) > 4 * (most // 3 + 1):
        refuse(name, f"{len(value)} characters", allowed)
    try:
        data = base64.b64decode(value, validate=True)
    except ValueError:
        refuse(name, value, allowed)
    if len(data) % 4 or len(data) > most:
        refuse(name, f"{len(data)} bytes", allowed)
    samples = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(samples).all():
        refuse(name, "samples that are no numbers", allowed)
    return samples


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        refuse(where, message, "an object with role and content")
    for name, field in message.items():
        if name not in _MESSAGE_FIELDS:
            raise InvalidRequestError(
                f"{where}.{name}: not a field of messages in this version", param=f"{where}.{name}"
            )
        if name in _NULL_ONLY and field:
            raise InvalidRequestError(f"{where}.{name}: not supported in this version", param=f"{where}.{name}")
    role = message.get("role")
    if role not in ROLES:
        refuse(f"{where}.role", role, ", ".join(ROLES))
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), (str, type(None))):
            refuse(f"{where}.{name}", message[name], "text")
    calls = message.get("tool_calls")
    if calls and (role != "assistant" or not isinstance(calls, list)):
        refuse(f"{where}.tool_calls", calls, "a list, in messages of the assistant")
    _check_content(message.get("content"), role, f"{where}.content")


def _normal(message: dict[str, Any]) -> dict[str, Any]:
    result = {name: field for name, field in message.items() if field is not None and name not in _NULL_ONLY}
    if result["role"] == "developer":
        result["role"] = "system"
    result.setdefault("content", None)
    return result


def _check_content(content: Any, role: str, where: str) -> None:
    if isinstance(content, str) or (content is None and role == "assistant"):
        return
    if not isinstance(content, list):
        refuse(where, content, "text or a list of parts")
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in PART_TYPES:
            if role != "user":
                refuse(f"{where}[{j}].type", kind, "text; images and sound only in messages of the user")
            continue  # its fields are checked where it is read
        if kind != "text":
            refuse(f"{where}[{j}].type", kind, ", ".join(("text", *PART_TYPES)))
        if not isinstance(part.get("text"), str) or len(part) != 2:
            refuse(f"{where}[{j}]", part, "type and text")


def _check_free(value: Any, where: str, before: int, left: int = MAX_DEPTH) -> int:
    """`before` plus the number of values inside.

    What goes on to other processes must not be nested deeper than every encoder on the way can follow.
    """
    if not isinstance(value, (list, dict)):
        return before
    if left == 0:
        raise InvalidRequestError(f"{where}: nested deeper than {MAX_DEPTH} levels", param=where)
    before += len(value)
    if before > MAX_FREE_VALUES:
        raise InvalidRequestError(f"{where}: more than {MAX_FREE_VALUES} values inside", param=where)
    for inner in value.values() if isinstance(value, dict) else value:
        before = _check_free(inner, where, before, left - 1)
    return before


def _texts(value: Any, param: str, most: int = MAX_PROMPTS) -> Prompts:
    items = value if isinstance(value, list) else [value]
    _check_count(items, param, most)
    for i, text in enumerate(items):
        where = f"{param}[{i}]" if isinstance(value, list) else param
        if not isinstance(text, str):
            refuse(param, text, f"text, as the other items ({where})")
        if not text:
            raise _empty(where, param)
    return Prompts([Prompt(text=text) for text in items], isinstance(value, list))


def _id_lists(value: Any, param: str, most: int = MAX_PROMPTS) -> Prompts:
    if not isinstance(value, list):
        refuse(param, value, "a list of token ids, or of such lists")
    if not value or not isinstance(value[0], list):
        return Prompts([Prompt(token_ids=_ids(value, param))], False)
    _check_count(value, param, most)
    return Prompts([Prompt(token_ids=_ids(ids, param, f"{param}[{i}]")) for i, ids in enumerate(value)], True)


def _check_count(items: list[Any], param: str, most: int) -> None:
    if not items:
        raise _empty(param, param)
    if len(items) > most:
        refuse(param, f"{len(items)} {_noun(param)}s", f"at most {most}")


def _ids(value: Any, param: str, where: str | None = None) -> list[int]:
    """`where`: the place of the ids in `param`, if it holds several lists."""
    where = where or param
    if not isinstance(value, list):
        refuse(param, value, "a list of token ids", where)
    if not value:
        raise _empty(where, param)
    for token in value:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            refuse(param, token, "token ids", where)
    return value


def _empty(where: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: the {_noun(param)} is empty", param=param)


def _noun(param: str) -> str:
    return "input" if param == "input" else "prompt"
