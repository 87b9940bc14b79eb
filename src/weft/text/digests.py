"""Digests of prompts: how a gateway and its workers speak of prompts without sending or tokenizing them.

A prompt's digests are a chain: each stands for everything up to its place. There is a place at the end of each message
and after every `BLOCK_CHARS` characters in it (of token ids, after every `BLOCK_IDS`), so two prompts have exactly the
digests in common that lie within their common beginning. Equal digests mean equal text, but for a chance of 2^-64 each;
they decide only where a request goes, never what is computed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

BLOCK_CHARS = 512
BLOCK_IDS = 128

Digests = list[tuple[str, int]]
"""Hex digits, and the length of the prompt up to there, in characters or ids."""


def chat_digests(messages: Sequence[Mapping[str, Any]], model: str = "") -> Digests:
    """Of messages as they come in a request; content parts and further fields count by their canonical JSON.

    `model`: name of the adapter that answers; prompts of different ones share nothing.
    """
    chain = _Chain(f"chat\0{model}")
    for message in messages:
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name != "content" and value is not None}
        if rest.get("role") == "developer":  # another name for the same
            rest["role"] = "system"
        text = content if isinstance(content, str) else _canonical(content)
        chain.add(_canonical(rest).encode("utf-8", "surrogatepass"))
        for block in _blocks(text, BLOCK_CHARS):
            chain.add(block.encode("utf-8", "surrogatepass"), len(block))
            if len(block) == BLOCK_CHARS:
                chain.mark()
        chain.add(b"\0end")
        chain.mark()
    return chain.digests


def text_digests(text: str, model: str = "") -> Digests:
    """Of a text that is to be continued."""
    chain = _Chain(f"text\0{model}")
    for block in _blocks(text, BLOCK_CHARS):
        chain.add(block.encode("utf-8", "surrogatepass"), len(block))
        chain.mark()
    return chain.digests


def ids_digests(ids: Sequence[int], model: str = "") -> Digests:
    """Of token ids."""
    chain = _Chain(f"ids\0{model}")
    for start in range(0, len(ids), BLOCK_IDS):
        block = array("q", ids[start : start + BLOCK_IDS])
        chain.add(block.tobytes(), len(block))
        chain.mark()
    return chain.digests


class _Chain:
    def __init__(self, seed: str) -> None:
        self.digests: Digests = []
        self._last = blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._length = 0

    def add(self, data: bytes, length: int = 0) -> None:
        """More of the prompt, which is `length` longer then."""
        self._last = blake2b(data, digest_size=8, key=self._last).digest()
        self._length += length

    def mark(self) -> None:
        """There is a place here."""
        self.digests.append((self._last.hex(), self._length))


def _blocks(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
