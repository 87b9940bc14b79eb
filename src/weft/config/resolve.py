"""Joins the sources of settings: defaults, then the YAML file, the environment, and last flags and `--set`.

Everything is checked where it enters, so an error names its source (and, in a file, the line) even when a later source
would have replaced the value. Nothing here reads the process's environment or command line by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import yaml

from weft.config.checks import check
from weft.config.schema import ENV_PREFIX, FLAGS, LEAVES, NOT_YET, NOT_YET_VALUES, SECTIONS, Leaf, not_yet
from weft.config.settings import Settings
from weft.config.yaml_file import load_settings_file
from weft.core.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, and for every key where its value came from.

    `sources` holds "default", "file x.yaml", "environment WEFT_HTTP__PORT", "flag --port", "argument MODEL" or "--set".
    """

    settings: Settings
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """One value for one key. `readings` are tried in order; the first that fits the key's type counts."""

    key: str
    readings: tuple[Any, ...]
    source: str
    place: str  # `source`, with the line where it has one


def resolve(
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> Resolved:
    """Resolves all settings. Later sources win; of `flags` and `sets`, `sets`; of two equal keys in `sets`, the last.

    Args:
        file: a YAML file.
        env: environment variables; those called `WEFT_SECTION__KEY` are read as YAML.
        flags: typed values by dotted key; None means that the flag was not given.
        sets: `section.key=value` strings, values read as YAML.

    Raises SettingsError, naming key, value and what is allowed, for: an unreadable or malformed file, an unknown key
    or one that this version does not have, a wrong type or range, and contradictions (see `weft.config.checks`).
    """
    values = {key: leaf.default for key, leaf in LEAVES.items()}
    sources = dict.fromkeys(values, "default")
    for given in chain(_from_file(file), _from_env(env or {}), _from_flags(flags or {}), _from_sets(sets)):
        values[given.key] = _convert(given)
        sources[given.key] = given.source
    settings = msgspec.convert(_nest(values), Settings)
    check(settings)
    return Resolved(settings=settings, sources=sources)


def _from_file(file: Path | None) -> Iterator[_Assignment]:
    if file is None:
        return
    tree, lines = load_settings_file(file)
    source = f"file {file}"

    def place(key: str) -> str:
        return f"{source}, line {lines[key]}" if key in lines else source

    for key, value in _flatten(tree, "", place):
        yield _Assignment(key, (value,), source, place(key))


def _from_env(env: Mapping[str, str]) -> Iterator[_Assignment]:
    squashed = {leaf.env.replace("__", "_"): leaf.env for leaf in LEAVES.values()}
    for name in sorted(env):
        source = f"environment {name}"
        if name in squashed:
            raise SettingsError(f"{source}: did you mean {squashed[name]}?")
        # Other programs may use the prefix too (a cluster sets WEFT_PORT for a service called weft); only the double
        # underscore marks a setting.
        if name.startswith(ENV_PREFIX) and "__" in name:
            if name != name.upper():
                raise SettingsError(f"{source}: did you mean {name.upper()}?")
            key = name.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            yield from _from_text(key, env[name], source)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[_Assignment]:
    for key, value in flags.items():
        if value is not None:
            source = FLAGS.get(key, f"argument {key}")
            _require_known(key, source)
            yield _Assignment(key, (value,), source, source)


def _from_sets(sets: Sequence[str]) -> Iterator[_Assignment]:
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            raise SettingsError(f"--set {item}: must be section.key=value")
        yield from _from_text(key.strip(), text, "--set")


def _from_text(key: str, text: str, source: str) -> Iterator[_Assignment]:
    """Reads `text` as YAML; where that does not fit, as plain text, so that a key like `123` needs no quotes."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    readings: tuple[Any, ...] = (value, text)
    if not isinstance(value, (list, dict)):
        readings += ([text],)
    if key in SECTIONS:
        for inner, part in _flatten({key: value}, "", lambda _: source):
            yield _Assignment(inner, (part,), source, source)
        return
    _require_known(key, source)
    yield _Assignment(key, readings, source, source)


def _flatten(tree: Mapping[Any, Any], prefix: str, place: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of known settings; an empty section is nothing. Raises SettingsError for others."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in SECTIONS:
            _require_known(key, place(key))
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, key + ".", place)
        elif value is not None:
            raise _section_as_value(key, place(key))


def _section_as_value(key: str, place: str) -> SettingsError:
    return SettingsError(f"{key} is a section, not a value; it has {_names_in(key)} ({place})", param=key)


def _names_in(section: str) -> str:
    """The keys of a section, or for "" the sections."""
    depth, prefix = section.count(".") + 1 if section else 0, f"{section}." if section else ""
    names = [k for k in (*SECTIONS, *LEAVES) if k.startswith(prefix) and k.count(".") == depth]
    return ", ".join(n.removeprefix(prefix) for n in names)


def _require_known(key: str, place: str) -> None:
    """Raises SettingsError unless `key` is a setting of this version."""
    if key in LEAVES:
        return
    if (promised := not_yet(key)) is not None:
        raise SettingsError(f"{promised}: not available in this version ({place})", param=key)
    if key in SECTIONS:
        raise _section_as_value(key, place)
    raise SettingsError(f"unknown setting {key} ({place}); {_suggestion(key)}", param=key)


def _suggestion(key: str) -> str:
    """The nearest known key; where nothing is near, what the section has."""
    section, _, name = key.rpartition(".")

    def likeness(known: str) -> float:
        # The name counts most: the right name in a wrong or missing section is as likely a slip as a wrong letter.
        in_section, _, known_name = known.rpartition(".")
        same_section = SequenceMatcher(None, section, in_section).ratio()
        return 0.8 * SequenceMatcher(None, name, known_name).ratio() + 0.2 * same_section

    nearest = max((*LEAVES, *SECTIONS, *NOT_YET), key=likeness)
    if likeness(nearest) >= 0.65:
        late = " (not available in this version)" if not_yet(nearest) is not None else ""
        return f"did you mean {nearest}{late}?"
    return f"{section} has {_names_in(section)}" if section in SECTIONS else f"sections are {_names_in('')}"


def _convert(given: _Assignment) -> Any:
    """The first reading that fits the key's type. Raises SettingsError with key, value and what is allowed."""
    leaf = LEAVES[given.key]
    for value in given.readings:
        try:
            plain = msgspec.to_builtins(msgspec.convert(value, leaf.type))
            msgspec.json.encode(plain)
            return plain
        except (msgspec.ValidationError, UnicodeEncodeError):
            continue  # UnicodeEncodeError: bytes that are not UTF-8 in a variable; children get settings as JSON
    raise _wrong_value(leaf, given)


def _wrong_value(leaf: Leaf, given: _Assignment) -> SettingsError:
    value = given.readings[0]
    shown = "this value (not shown)" if leaf.secret else _show(value)
    if isinstance(value, str) and value in NOT_YET_VALUES.get(leaf.key, ()):
        what = f"{shown} is not available in this version"
    else:
        what = f"{shown} is not allowed"
    return SettingsError(f"{leaf.key}: {what}; allowed: {leaf.allowed} ({given.place})", param=leaf.key)


def _show(value: Any) -> str:
    """A value as a settings file would have it, cut to a length that fits a message."""
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"http.port": 1} → {"http": {"port": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return tree
