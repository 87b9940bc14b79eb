"""Settings in other forms: JSON for child processes, masked mappings for logs, rows for `weft config`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from weft.config.checks import check
from weft.config.resolve import Resolved
from weft.config.schema import LEAVES
from weft.config.settings import Settings
from weft.core.errors import SettingsError

MASK = "***"


class Row(NamedTuple):
    """One line of `weft config`: values as in a settings file, secrets masked."""

    key: str
    value: str
    source: str


def to_json(settings: Settings) -> bytes:
    """All settings, secrets included: for a child process's pipe or environment, never for a log."""
    return msgspec.json.encode(settings)


def from_json(data: bytes) -> Settings:
    """The inverse of `to_json`, with every check made again. Raises SettingsError."""
    try:
        settings = msgspec.json.decode(data, type=Settings)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SettingsError(f"settings in JSON: {error}") from error
    check(settings)
    return settings


def masked(settings: Settings) -> dict[str, Any]:
    """The tree as plain dicts and lists with secrets masked, for logs."""
    tree: dict[str, Any] = msgspec.to_builtins(settings)
    for leaf in LEAVES.values():
        if leaf.secret:
            *path, name = leaf.key.split(".")
            node = tree
            for part in path:
                node = node[part]
            node[name] = [MASK for _ in node[name]]
    return tree


def format_value(value: Any) -> str:
    """A value as a settings file has it: text bare, everything else as JSON (whole numbers without `.0`)."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


def describe(resolved: Resolved) -> list[Row]:
    """One row for each setting, in the order of the tree; secrets are masked."""
    tree = masked(resolved.settings)
    rows = []
    for key in LEAVES:
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        rows.append(Row(key, format_value(value), resolved.sources[key]))
    return rows
