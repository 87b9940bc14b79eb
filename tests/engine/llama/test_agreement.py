"""The bundled model as F16 GGUF against its safetensors on the torch engine: the same evaluation, the same score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers, which the evaluation imports, is not installed")

from tools.demo_model.evaluate import Builder, Case
from tools.demo_model.export_gguf import export
from weft.backends.registry import BUNDLED_MODEL
from weft.core.sampling import SamplingParams
from weft.engine.llm import LLM

CASES = 6
"""Of each of 14 kinds and 2 languages."""


def cases() -> list[Case]:
    return [case for language in ("en", "zh") for case in Builder(language, 3).all(CASES)]


def share_right(model: Path, **options: Any) -> tuple[float, list[str]]:
    """The share of cases answered rightly, and all answers."""
    asked = cases()
    with LLM(str(model), **options) as llm:
        for limit in sorted({case.limit for case in asked}):
            group = [case for case in asked if case.limit == limit]
            chats = [[{"role": role, "content": text} for role, text in case.messages] for case in group]
            params = SamplingParams(temperature=0.0, max_new_tokens=limit)
            for case, answer in zip(group, llm.chat(chats, params), strict=True):
                case.answer = answer.text
    return sum(case.check(case.answer) for case in asked) / len(asked), [case.answer for case in asked]


def test_the_same_score_within_one_percent(tmp_path: Path) -> None:
    gguf = export(BUNDLED_MODEL, tmp_path / "demo-f16.gguf", "F16")
    theirs, texts = share_right(BUNDLED_MODEL, backend="torch", dtype="float32")
    ours, answers = share_right(gguf)
    assert theirs > 0.9
    assert abs(ours - theirs) <= 0.01, (ours, theirs)
    assert sum(a == b for a, b in zip(answers, texts, strict=True)) >= 0.9 * len(texts)
