"""Reads a settings file, strictly: a duplicate key is an error, and every key knows its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from weft.core.errors import SettingsError


def load_settings_file(file: Path) -> tuple[dict[Any, Any], dict[str, int]]:
    """Returns (tree, line of each dotted key, from 1). An empty file is an empty tree.

    Raises SettingsError for a file that cannot be read, is not UTF-8, is not YAML (with the line), has the same key
    twice, or whose top is not a mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"file {file} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise SettingsError(f"file {file} cannot be read: {error.strerror or error}") from error
    try:
        return _parse(file, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise SettingsError(f"file {file}{line}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a scalar that looks like a date or a number and is none, such as 2024-13-45.
        raise SettingsError(f"file {file}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"file {file}: nested too deeply") from error


def _parse(file: Path, text: str) -> tuple[dict[Any, Any], dict[str, int]]:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"file {file}: settings are a mapping of sections, such as `http: {{port: 8000}}`")
        lines: dict[str, int] = {}
        # Before construction, which keeps the last of two equal keys and says nothing.
        _scan(file, root, "", lines, ())
        return loader.construct_document(root), lines
    finally:
        loader.dispose()


def _scan(file: Path, node: yaml.Node, prefix: str, lines: dict[str, int], above: tuple[yaml.Node, ...]) -> None:
    """Notes the line of each key below `node`; raises SettingsError for a key that is there twice."""
    if any(node is ancestor for ancestor in above):
        raise SettingsError(f"file {file}, line {node.start_mark.line + 1}: an anchor that contains itself")
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _scan(file, item, prefix, {}, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if name in seen:
            raise SettingsError(f"file {file}, line {line}: {prefix}{name} is already set on line {seen[name]}")
        seen[name] = lines[prefix + name] = line
        _scan(file, value_node, f"{prefix}{name}.", lines, above)
