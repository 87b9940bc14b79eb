"""The hash of a conversation's history: how a turn finds the worker that still holds what came before it.

A hash is SHA-256 over canonical JSON (sorted keys, no blanks, UTF-8) of `[{role, content}, …]`. A conversation whose
messages say more than that (names, tool calls) has none: two such conversations could differ and still look the same.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

Messages = list[dict[str, Any]]


def history_hash(messages: Messages) -> str | None:
    """Hex digits; None for no messages at all, or where role and content do not tell everything."""
    if not messages or any(not _is_plain(message) for message in messages):
        return None
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def split_at_last_user(messages: Messages) -> tuple[Messages, Messages]:
    """What came before the last user's turn, and that turn; without a user's message, everything is new."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            return messages[:index], messages[index:]
    return [], messages


def _is_plain(message: dict[str, Any]) -> bool:
    said = {name for name, value in message.items() if value is not None}
    return said == {"role", "content"}
