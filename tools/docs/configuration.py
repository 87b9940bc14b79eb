"""Writes docs/configuration.md from the settings' own descriptions: `python tools/docs/configuration.py [--check]`.

With `--check` nothing is written; the exit code is 1 when the page in the repository is not current.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from weft.config.describe import format_value
from weft.config.schema import LEAVES, NOT_YET, NOT_YET_VALUES, SECTIONS, Leaf

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by tools/docs/configuration.py; change the descriptions in src/weft/config/settings.py instead. -->

Settings are resolved once, at start, from four sources. A later one wins:

1. the defaults below;
2. a YAML file: `weft serve --config FILE`;
3. environment variables: `WEFT_SECTION__KEY`, such as `WEFT_HTTP__PORT=8001` or `WEFT_BACKEND__TORCH__DEVICE=cpu`;
4. command-line flags, and then `--set section.key=value`, which works for every setting.

Values from the environment and from `--set` are read as YAML: `null`, `true`, `[a, b]`. For `http.api_keys` a single
key needs no brackets. `weft config` prints what came out, and the source of each value.

An unknown key, a wrong type, a value out of range or a contradiction between two settings ends the start with exit
code 2, before anything is loaded. `auto` is decided when the model and the machine are known.
"""

CONTRADICTIONS = """\
## Contradictions

Refused, naming both keys, where both are given as numbers:

- `scheduler.max_batch_size` above `http.max_concurrent_requests`;
- `scheduler.chunked_prefill_size` above `scheduler.max_prefill_tokens`;
- `kv_cache.page_size` above `kv_cache.max_items`;
- `scheduler.max_input_tokens` or `scheduler.max_output_tokens` above `model.max_context_tokens` or above
  `kv_cache.max_items`.

An adapter in `model.lora` must not have the name of the model itself (`model.served_name`).
"""


def _row(leaf: Leaf) -> str:
    name = leaf.key.rpartition(".")[2]
    cells = (f"`{name}`", f"`{format_value(leaf.default)}`", leaf.allowed, f"`{leaf.env}`", leaf.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _section(key: str) -> str:
    leaves = [leaf for leaf in LEAVES.values() if leaf.key.rpartition(".")[0] == key]
    lines = [f"## {key}", "", inspect.cleandoc(SECTIONS[key].__doc__ or "")]
    if leaves:
        lines += ["", "| key | default | allowed | environment | meaning |", "|---|---|---|---|---|"]
        lines += [_row(leaf) for leaf in leaves]
    return "\n".join(lines) + "\n"


def _not_yet() -> str:
    keys = ", ".join(f"`{key}`" for key in NOT_YET)
    values = "; ".join(f"`{key}`: {', '.join(f'`{v}`' for v in values)}" for key, values in NOT_YET_VALUES.items())
    return (
        "## Not available in this version\n\n"
        "These names are reserved. Giving one is an error that says so.\n\n"
        f"- Keys and sections: {keys}.\n- Values: {values}.\n"
    )


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(key) for key in SECTIONS), CONTRADICTIONS, _not_yet()])


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    page = render()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print("docs/configuration.md is not current: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
