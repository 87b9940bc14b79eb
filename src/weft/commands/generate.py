"""`weft generate`: one prompt, or a file of them, without a server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.settings import Settings
from weft.core.errors import InvalidRequestError, WeftError
from weft.core.sampling import SamplingParams
from weft.engine.llm import LLM, Completion

BATCH = 256  # lines in the engine at once: enough to fill it, few enough to lose little when interrupted


def generate_one(
    settings: Settings, prompt: str, params: SamplingParams, *, chat: bool, adapter: str | None = None
) -> None:
    """Streams one completion to stdout."""
    with LLM(settings=settings) as llm:
        for piece in llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params, adapter=adapter):
            print(piece, end="", flush=True)
    print()


def generate_file(
    settings: Settings, source: Path, target: Path, params: SamplingParams, *, adapter: str | None = None
) -> None:
    """Answers every line of `source` in `target`, in order, with this adapter.

    A line is {"prompt": text or token ids} or {"messages": [...]}, with any fields of SamplingParams beside it. What
    `target` already answers is kept: line k of it belongs to line k of `source`, and a line cut short is done again.
    Raises InvalidRequestError naming the line.
    """
    jobs = list(_read(source, params))
    done = _resume(target, len(jobs))
    if done == len(jobs):
        print(f"{target}: all {done} lines are there already", file=sys.stderr)
        return
    with LLM(settings=settings) as llm, target.open("a", encoding="utf-8") as out:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("generating", total=len(jobs), completed=done)
            for start in range(done, len(jobs), BATCH):
                for line in _answer(llm, jobs[start : start + BATCH], adapter):
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                out.flush()
                os.fsync(out.fileno())
                bar.update(task, completed=min(len(jobs), start + BATCH))


def _answer(llm: LLM, jobs: list[tuple[Any, SamplingParams]], adapter: str | None) -> Iterator[dict[str, Any]]:
    for answer in llm.run(jobs, adapter=adapter):
        if isinstance(answer, Completion):
            yield {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": len(answer.token_ids),
                "cached_tokens": answer.cached_tokens,
            }
        else:
            yield {"error": answer.message}


def _read(source: Path, params: SamplingParams) -> Iterator[tuple[Any, SamplingParams]]:
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"--file {source}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry.pop("messages", None) or entry.pop("prompt")
            yield prompt, replace(params, **entry)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise InvalidRequestError(
                f"{source}, line {number}: {error} (wanted: a JSON object with prompt or messages, and sampling"
                " parameters)"
            ) from error
        except WeftError as error:
            raise InvalidRequestError(f"{source}, line {number}: {error}") from error


def _resume(target: Path, wanted: int) -> int:
    """How many whole lines are there; cuts a half-written last one off. Raises when there are more than wanted."""
    if not target.exists():
        return 0
    data = target.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with target.open("r+b") as file:
            file.truncate(len(whole))
    done = whole.count(b"\n")
    if done > wanted:
        raise InvalidRequestError(f"--output {target}: it has {done} lines, the input only {wanted}; is it another's?")
    return done
