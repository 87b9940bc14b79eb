"""Facts about every setting, read off the types in `settings`: key, type, default, allowed values, meaning.

Validation, error texts, `weft config` and docs/configuration.md all work from `LEAVES`, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from weft.config.settings import Section, Settings

ENV_PREFIX = "WEFT_"

FLAGS: dict[str, str] = {
    "model.path": "argument MODEL",
    "model.served_name": "flag --served-name",
    "model.dtype": "flag --dtype",
    "model.lora": "flag --lora",
    "http.host": "flag --host",
    "http.port": "flag --port",
    "http.api_keys": "flag --api-key",
    "backend.name": "flag --backend",
    "backend.torch.tp": "flag --tp",
    "engine.record": "flag --record",
    "engine.restart": "flag --restart",
}
"""Settings that the command line has a flag of its own for, and what that flag is called in messages."""

NOT_YET: tuple[str, ...] = (
    "backend.deterministic",
    "backend.quantize",
    "backend.cpu",
    "backend.torch.mem_fraction_static",
    "backend.torch.cuda_graphs",
    "backend.torch.tp",
)
"""Promised keys (and whole sections) that this version does not have: refused with exactly that statement."""

NOT_YET_VALUES: dict[str, tuple[str, ...]] = {
    "backend.name": ("cpu",),
    "kv_cache.kv_type": ("fp8", "q8"),
    "backend.torch.attention": ("triton", "fa", "fi"),
}
"""The same for single values of keys that exist."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting.

    Attributes:
        key: dotted path, such as "http.port".
        type: the annotated type that a value is converted to.
        default: in the form that `msgspec.convert` takes back.
        allowed: for people, such as "auto or integer from 1 to 65536".
        secret: its value is shown nowhere.
    """

    key: str
    type: Any
    default: Any
    description: str
    allowed: str
    secret: bool

    @property
    def env(self) -> str:
        """Name of its environment variable: `WEFT_HTTP__PORT`."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()


def _alternatives(info: inspect.Type) -> list[str]:
    """What a type allows, one entry for each alternative."""
    match info:
        case inspect.Metadata():
            return _alternatives(info.type)
        case inspect.UnionType():
            return [text for part in info.types for text in _alternatives(part)]
        case inspect.LiteralType():
            return [str(value) for value in info.values]
        case inspect.NoneType():
            return ["null"]
        case inspect.BoolType():
            return ["true", "false"]
        case inspect.IntType():
            return [f"integer from {info.ge} to {info.le}"]
        case inspect.FloatType() if info.gt is not None:
            return [f"number above {info.gt:g} up to {info.le:.9g}"]
        case inspect.FloatType():
            return [f"number from {info.ge:g} to {info.le:.9g}"]
        case inspect.StrType():
            return ["text"]
        case _:
            # A new kind of field needs words of its own: Meta(extra={"allowed": ...}).
            raise TypeError(f"no words for what {info} allows")


def _allowed(info: inspect.Type) -> str:
    if isinstance(info, inspect.Metadata) and info.extra is not None and "allowed" in info.extra:
        return str(info.extra["allowed"])
    *others, last = _alternatives(info)
    return f"{', '.join(others)} or {last}" if others else last


def _walk(cls: type[Section], prefix: str, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Leaf | type[Section]]]:
    """Yields (key, Leaf) and (key, section class) in the order in which the classes declare them."""
    hints = get_type_hints(cls, include_extras=True)
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        key = prefix + field.name
        if isinstance(field.type, inspect.StructType):
            section = hints[field.name]
            yield key, section
            yield from _walk(section, key + ".", defaults[field.name])
            continue
        meta = field.type
        if not isinstance(meta, inspect.Metadata) or not (meta.extra_json_schema or {}).get("description"):
            raise TypeError(f"setting {key} has no description")
        yield (
            key,
            Leaf(
                key=key,
                type=hints[field.name],
                default=defaults[field.name],
                description=(meta.extra_json_schema or {})["description"],
                allowed=_allowed(meta),
                secret=bool((meta.extra or {}).get("secret")),
            ),
        )


_nodes = dict(_walk(Settings, "", msgspec.to_builtins(Settings())))

LEAVES: dict[str, Leaf] = {key: node for key, node in _nodes.items() if isinstance(node, Leaf)}
"""Every setting by key, in the order of the tree."""

SECTIONS: dict[str, type[Section]] = {key: node for key, node in _nodes.items() if not isinstance(node, Leaf)}
"""Every section by key ("http", "backend.torch")."""


def not_yet(key: str) -> str | None:
    """The promised key or section that `key` is or lies in, where this version does not have it; else None."""
    return next((name for name in NOT_YET if key == name or key.startswith(name + ".")), None)
