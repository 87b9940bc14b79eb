"""`LlamaCppEmbeddingBackend`: `LlamaCppEmbedder` behind the `Backend` protocol.

A row is a whole text, and its vector all that is left of it: no KV outlives the step, so there is none to allocate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.backends.base import Geometry, Progress
from weft.backends.llama_cpp.embedder import LlamaCppEmbedder
from weft.core.errors import EngineError
from weft.core.plan import StepPlan, StepResult

RUNNING_SET = 64
"""What `http.max_concurrent_requests` is when it is `auto`: texts are often short, and a step takes many."""


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """Args of the engine.

    Attributes:
        num_sequences: most texts that llama.cpp computes at once, 1 to 256.
        batch_tokens: most tokens of theirs; a longer text is computed alone.
        threads, gpu_layers, max_input_tokens, flash_attention: see `LlamaCppEmbedder`.
    """

    num_sequences: int = RUNNING_SET
    batch_tokens: int = 512
    threads: int | None = None
    gpu_layers: int | None = None
    max_input_tokens: int | None = None
    flash_attention: bool | None = None


class LlamaCppEmbeddingBackend:
    """See the module's docstring. `path` is a GGUF file, or any one of several."""

    name = "llama_cpp"
    features = frozenset({"embeddings"})

    def __init__(self, path: Path, options: EmbeddingOptions | None = None) -> None:
        self._options = options = options or EmbeddingOptions()
        self._embedder = LlamaCppEmbedder(
            path,
            threads=options.threads,
            gpu_layers=options.gpu_layers,
            batch_tokens=options.batch_tokens,
            max_sequences=options.num_sequences,
            max_input_tokens=options.max_input_tokens,
            flash_attention=options.flash_attention,
        )

    def load(self, progress: Progress | None = None) -> Geometry:
        """Reads the model and makes its context. Raises ModelLoadError, for rerankers too."""
        facts = self._embedder.load(progress)
        return Geometry(
            num_layers=facts.num_layers,
            kv_bytes_per_token=0,
            max_context_tokens=facts.max_input_tokens,
            vocab_size=facts.vocab_size,
            eos_token_ids=(),
            description=facts.description,
            running_set=RUNNING_SET,
            shares_prefixes=False,
            max_step_tokens=self._options.batch_tokens,
            dimensions=facts.dimensions,
        )

    def allocate_kv(self, num_slots: int) -> None:
        """Nothing: the context was made by `load`, for one step, and `num_slots` only counts the tokens of steps."""

    def forward(self, plan: StepPlan) -> StepResult:
        """The vectors of a step's texts. Raises StepCancelled when `cancel` has broken it off."""
        ends = np.cumsum(plan.extend_lens)
        texts = [plan.token_ids[end - length : end] for end, length in zip(ends, plan.extend_lens, strict=True)]
        result = StepResult(np.full(plan.num_rows, -1, dtype=np.int32))
        for row, vector in enumerate(self._embedder.embed(texts, plan.step)):
            if isinstance(vector, EngineError):
                result.errors[row] = vector.message
            else:
                result.embeddings[row] = vector
        return result

    def cancel(self, step: int) -> None:
        """Breaks a step off before llama.cpp's next operation."""
        self._embedder.cancel(step)

    def close(self) -> None:
        """Gives the model and its buffers back."""
        self._embedder.close()
