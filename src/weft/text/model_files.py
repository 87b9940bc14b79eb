"""Reads what a checkpoint folder says about its tokenizer, apart from `tokenizer.json` itself.

Every file but `tokenizer.json` may be missing. A broken file is a `ModelLoadError` that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import ModelLoadError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERT = (
    'Convert it once where the transformers library is installed: python -c "from transformers import AutoTokenizer; '
    "AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`named` maps bos_token, eos_token, … to their texts; `extra` are further special tokens that the settings list.

    `eos_ids` and `bos_id` come from generation_config.json, else config.json; `templates` maps the names of chat
    templates ("default", "tool_use", …) to their sources, empty if there is none.
    """

    tokenizer_path: Path
    named: dict[str, str]
    extra: tuple[str, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    templates: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the folder. Errors: `ModelLoadError` if it has no `tokenizer.json` or a file in it is broken."""
    path = _tokenizer_path(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    special = _read_json(folder / "special_tokens_map.json") | settings
    named = {name: text for name in _NAMED if (text := _token_text(special.get(name))) is not None}
    listed = _listed(special.get("additional_special_tokens")) + _listed(special.get("extra_special_tokens"))
    extra = tuple(text for item in listed if (text := _token_text(item)) is not None)
    model = _read_json(folder / "config.json")
    sources = (_read_json(folder / "generation_config.json"), model, model.get("text_config") or {})
    return TokenizerFiles(
        tokenizer_path=path,
        named=named,
        extra=extra,
        bos_id=next((ids[0] for source in sources if (ids := _ids(source.get("bos_token_id")))), None),
        eos_ids=next((ids for source in sources if (ids := _ids(source.get("eos_token_id")))), ()),
        templates=_templates(folder, settings),
    )


def read_text(path: Path) -> str:
    """A text file's content; `ModelLoadError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error


def _tokenizer_path(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: not a folder; a checkpoint folder with a tokenizer.json is needed")
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    for other in ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt"):
        if (folder / other).is_file():
            hint = _CONVERT.format(folder=folder)
            raise ModelLoadError(f"{folder}: has {other} but no tokenizer.json, the only form read here. {hint}")
    raise ModelLoadError(f"{path}: missing; download the checkpoint's tokenizer files into this folder")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path}: broken JSON at line {error.lineno}: {error.msg}; download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`; empty means none."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _ids(value: Any) -> tuple[int, ...]:
    """An id is written as a number or a list of numbers; negative ones mean none."""
    items: Iterable[Any] = value if isinstance(value, list) else (value,)
    return tuple(i for i in items if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates: *.jinja files go before tokenizer_config.json, that before the old chat_template.json."""
    files: dict[str, str] = {}
    if (main := folder / "chat_template.jinja").is_file():
        files["default"] = read_text(main)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = read_text(path)
    if files:
        return files
    for value in (settings.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            return {entry["name"]: entry["template"] for entry in value if {"name", "template"} <= set(entry)}
    return {}
