"""The README's examples run as they stand (but for the port)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.worker import Worker

pytest.importorskip("torch", reason="the examples use the demo model")

README = Path(__file__).parent.parent.parent / "README.md"


def _examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_openai_example_recalls_the_name() -> None:
    (code,) = [example for example in _examples() if "openai" in example]
    with Worker(backend="torch") as worker:
        first, second = _run(code.replace("http://127.0.0.1:8000", worker.url)).splitlines()
    assert first
    assert "Mira" in second


def test_llm_example_counts() -> None:
    (code,) = [example for example in _examples() if "LLM(" in example]
    assert "3" in _run(code)
