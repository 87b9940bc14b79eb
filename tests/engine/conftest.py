"""Engines over the fake backend, with the demo model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from weft.backends.registry import BUNDLED_MODEL
from weft.config.resolve import resolve
from weft.config.settings import Settings
from weft.engine.llm import LLM
from weft.text.tokenizer import Tokenizer


def fake_settings(*sets: str) -> Settings:
    """Settings of a small fake engine; `sets` are `section.key=value`."""
    return resolve(sets=["backend.name=fake", "kv_cache.max_items=8192", *sets]).settings


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


@pytest.fixture
def new_llm() -> Iterator[Callable[..., LLM]]:
    """`new_llm("section.key=value", ...)`."""
    opened: list[LLM] = []

    def make(*sets: str) -> LLM:
        opened.append(LLM(settings=fake_settings(*sets)))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()
