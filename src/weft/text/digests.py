"""Digests of prompts."""

from __future__ import annotations

import hashlib
from typing import Any


def prompt_digests(prompt: Any, *, model: str | None = None) -> list[tuple[str, int]]:
    """temporary"""
    out = []
    h = hashlib.blake2b(repr(model).encode(), digest_size=8)
    n = 0
    items = (
        [f"{m.get('role')}\0{m.get('content')}" for m in prompt]
        if prompt and isinstance(prompt, list) and isinstance(prompt[0], dict)
        else [prompt]
    )
    for item in items:
        step = 512 if isinstance(item, str) else 128
        for i in range(0, len(item), step):
            h = hashlib.blake2b(h.digest() + repr(item[i : i + step]).encode(), digest_size=8)
            n += len(item[i : i + step])
            out.append((h.hexdigest(), n))
    return out
