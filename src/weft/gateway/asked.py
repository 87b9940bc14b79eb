"""What the gateway wants to know of a request's body: enough to route it, and to go on with it elsewhere.

Whether a body is valid is the worker's to say: what cannot be understood here is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.text.digests import Digests, chat_digests, ids_digests, text_digests

MAX_LOOKED_INTO_BYTES = 1 << 20
"""Larger bodies are routed by load alone, and their streams cannot be continued: reading them would stop others."""

MAX_MESSAGES = 2000
"""Of more, no digests are made, for the same reason."""

KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/generate": "generate",
    "/v1/embeddings": "embeddings",
}
"""What takes a slot of a worker, and waits in the line for it."""

_CONTINUED = ("chat", "completions", "generate")


class _Fields(msgspec.Struct):
    model: Any = None
    messages: Any = None
    prompt: Any = None
    text: Any = None
    input_ids: Any = None
    input: Any = None
    stream: Any = None
    n: Any = None
    seed: Any = None
    echo: Any = None
    weft_resume: Any = None


_decode = msgspec.json.Decoder(_Fields).decode


@dataclass(frozen=True, slots=True)
class Asked:
    """A body as far as it was understood. `continued`: a stream that can go on on another worker."""

    digests: Digests
    length: int = 0
    ids: bool = False
    stream: bool = False
    continued: bool = False


def look_into(kind: str, body: bytes, base_models: Collection[str]) -> Asked:
    """What the body of such a request says. `base_models`: names of what the workers serve, adapters aside."""
    if len(body) > MAX_LOOKED_INTO_BYTES:
        return Asked([])
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return Asked([])
    prompt = next((p for p in (fields.messages, fields.prompt, fields.text, fields.input_ids) if p is not None), None)
    single, is_ids = _single(prompt, chat=fields.messages is not None)
    stream = fields.stream is True
    continued = kind in _CONTINUED and stream and single is not None and fields.n in (None, 1) and not fields.echo
    if single is None:
        return Asked([], _rough_length(prompt if prompt is not None else fields.input), False, stream, continued)
    if isinstance(single, list) and not is_ids and len(single) > MAX_MESSAGES:
        return Asked([], len(body), False, stream, continued)
    model = fields.model if isinstance(fields.model, str) and fields.model not in base_models else ""
    digests = _digests(single, is_ids, model)
    length = digests[-1][1] if digests else 0
    return Asked(digests, length, is_ids, stream, continued and fields.weft_resume is None)


def _single(prompt: Any, *, chat: bool) -> tuple[Any, bool]:
    """The one prompt in it, and whether it is token ids; None where there are several, or it is malformed."""
    if chat:
        well_formed = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)
        return (prompt if well_formed else None), False
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, False
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < 2**31 for i in prompt):
        return prompt, True
    return None, False


def _digests(prompt: Any, is_ids: bool, model: str) -> Digests:
    if isinstance(prompt, str):
        return text_digests(prompt, model)
    return ids_digests(prompt, model) if is_ids else chat_digests(prompt, model)


def _rough_length(prompts: Any) -> int:
    if isinstance(prompts, list):
        return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return len(prompts) if isinstance(prompts, str) else 0
