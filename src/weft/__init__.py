"""Weft serves large language models: continuous batching, a radix-tree KV cache, strict request lifecycles.

Only names are imported here; `LLM` and its engines load on first use, so that `import weft` costs milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from weft.core.sampling import SamplingParams
    from weft.engine.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from weft.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from weft.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
