"""Pieces of JSON that the OpenAI endpoints share: usage, log probabilities, and chunks put together from bytes.

Chunks are not built from objects: on the way of every token stands one encoder call for its text, and a join.
"""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from weft.ipc.messages import TextLogprob
from weft.server.jobs import Job

to_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"

_CONTINUATION = bytes(range(0x80, 0xC0))  # UTF-8's bytes inside a character

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM's number."""


def document(job: Job, prefix: str, kind: str, model: str, choices: list[dict[str, Any]], *, with_facts: bool) -> bytes:
    """A whole answer in OpenAI's form: what all its kinds have in common around their choices."""
    answer: dict[str, Any] = {
        "id": f"{prefix}-{job.public_id}",
        "object": kind,
        "created": job.created,
        "model": model,
        "choices": choices,
        "usage": usage(job),
    }
    if with_facts:
        answer["weft"] = job.facts()
    return to_json(answer)


class JsonList:
    """A long list as JSON text, made piece by piece, so that no piece takes long."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def extend(self, values: list[Any]) -> None:
        if values:
            self._parts.append(to_json(values)[1:-1])

    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


def usage(job: Job) -> dict[str, Any]:
    prompt, cached, completion = job.tokens()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(entries: list[TextLogprob]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice."""
    return [
        _chat_entry(entry.token, entry.token_bytes, entry.logprob)
        | {"top_logprobs": [_chat_entry(*top) for top in entry.top]}
        for entry in entries
    ]


def _chat_entry(token: str, token_bytes: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token_bytes)}


class TextLogprobs:
    """`logprobs` of a text choice: four lists. `text_offset` counts characters of the choice's text.

    Offsets come from the tokens' bytes, so that a character made of several tokens counts once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: list[TextLogprob]) -> dict[str, list[Any]]:
        """The lists for these tokens, which follow those of the last call."""
        result = empty_lists()
        for entry in entries:
            offset = self._offset_of(entry.token_bytes)
            _append(result, entry.token, max(entry.logprob, MIN_LOGPROB), _top(entry), offset)
        return result

    def skip(self, data: bytes) -> None:
        """Counts the bytes of tokens that were told of elsewhere."""
        self._offset += len(self._decoder.decode(data))

    def _offset_of(self, data: bytes) -> int:
        """Where the character begins to which the first of these bytes belongs; they follow those of the last call."""
        continues = bool(self._decoder.getstate()[0])
        self._offset += len(self._decoder.decode(data))
        unfinished = bool(self._decoder.getstate()[0])
        own = data.lstrip(_CONTINUATION) if continues else data
        length = len(own.decode("utf-8", "replace")) + (len(own) < len(data))
        return self._offset + unfinished - length

    def take_prompt(self, text: str, entries: list[TextLogprob | None]) -> dict[str, list[Any]]:
        """The lists for an echoed prompt. Nothing precedes its first token, which has no log probability."""
        known = [entry for entry in entries if entry is not None]
        rest = b"".join(entry.token_bytes for entry in known).decode("utf-8", "replace")
        first = text.removesuffix(rest) if text.endswith(rest) else ""
        result = empty_lists()
        if len(known) < len(entries):
            _append(result, first, None, None, 0)
            self._offset += len(first)
        for name, values in self.take(known).items():
            result[name] += values
        return result


def join_lists(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    result = empty_lists()
    for part in parts:
        for name, values in part.items():
            result[name] += values
    return result


def empty_lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _append(lists: dict[str, list[Any]], token: str, logprob: float | None, top: Any, offset: int) -> None:
    lists["tokens"].append(token)
    lists["token_logprobs"].append(logprob)
    lists["top_logprobs"].append(top)
    lists["text_offset"].append(offset)


def _top(entry: TextLogprob) -> dict[str, float]:
    """Text to log probability, the likeliest first; always with the chosen token, as in OpenAI's API."""
    result: dict[str, float] = {}
    for token, _, logprob in entry.top:
        result.setdefault(token, max(logprob, MIN_LOGPROB))  # two tokens may have one text: the likelier counts
    result.setdefault(entry.token, max(entry.logprob, MIN_LOGPROB))
    return result


class ChunkHead:
    """The constant start of every chunk of one stream, and its last chunks."""

    def __init__(self, job: Job, answer_id: str, kind: str, model: str, *, with_usage: bool, with_facts: bool) -> None:
        fields = {"id": answer_id, "object": kind, "created": job.created, "model": model}
        self._start = b"data: " + to_json(fields)[:-1] + b',"choices":['
        self.choice = self._start + b'{"index":'
        self.end = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._job = job
        self._with_usage = with_usage
        self._with_facts = with_facts

    def tail(self) -> bytes:
        """The chunk without choices for what was asked for: `usage`, `weft`; and the end of the stream."""
        extra: dict[str, Any] = {}
        if self._with_usage:
            extra["usage"] = usage(self._job)
        if self._with_facts:
            extra["weft"] = self._job.facts()
        return self._start + b"]," + to_json(extra)[1:] + b"\n\n" + DONE if extra else DONE
