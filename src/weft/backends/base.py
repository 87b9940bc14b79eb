"""The `Backend` protocol: the whole of what the engine knows about whatever computes a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from weft.core.errors import InvalidRequestError
from weft.core.plan import StepPlan, StepResult

Progress = Callable[[int, int], None]
"""Called while weights load with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Facts of a loaded model that scheduling and sizing need.

    Attributes:
        kv_bytes_per_token: bytes that one token's K and V take over all layers; 0 for an embedding model.
        max_context_tokens: longest sequence that the model's positions allow.
        vocab_size: token ids are 0 to vocab_size - 1 (the width of the logits).
        eos_token_ids: tokens that end a text, from generation_config.json, else config.json.
        description: one line for people, such as "Qwen3ForCausalLM, 28 layers, bfloat16".
        dtype: of weights and KV, such as "bfloat16".
        running_set: what `http.max_concurrent_requests` is when it is `auto`.
        plans_ahead: whether it pays to plan a step while another runs, when `scheduler.overlap` is `auto`.
        kv_budget_bytes: what the KV pool may take on the device when nothing bounds it; None: a share of the host's
            free memory.
        shares_prefixes: False where a state belongs to a whole sequence (recurrent layers): only such are reused.
        max_step_tokens: most prompt tokens that a step may have.
        num_sequences: sequence ids, where KV is stored under such instead of in slots (`StepPlan.sequences`).
        piece_tokens: longest run of tokens that can move to host memory at once; None: none can.
        dimensions: of the vectors of an embedding model; its KV, if it has any, does not outlive the step.
    """

    num_layers: int
    kv_bytes_per_token: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    description: str
    dtype: str = ""
    running_set: int = 64
    plans_ahead: bool = False
    kv_budget_bytes: int | None = None
    num_sequences: int | None = None
    shares_prefixes: bool = True
    max_step_tokens: int | None = None
    piece_tokens: int | None = None
    dimensions: int | None = None


class Backend(Protocol):
    """Computes steps. Used by one thread at a time, but for `cancel`.

    Life: construct (cheap, checks settings), `load`, `allocate_kv`, then `forward` as often as wanted, `close`.
    """

    name: str
    features: frozenset[str]
    """Of "logprobs", "prompt_logprobs", "logit_bias", "penalties": requests that need another one are refused.

    And "lora": without it the setting `model.lora` is refused, so that no plan has an adapter.
    "embeddings": it makes vectors of prompts, and generates nothing (`check_kind`).
    """

    def load(self, progress: Progress | None = None) -> Geometry:
        """Reads the model. Raises ModelLoadError, naming the file, tensor or architecture at fault."""
        ...

    def allocate_kv(self, num_slots: int) -> None:
        """Makes the KV pool: slots 0 to num_slots - 1, one token's K and V over all layers each."""
        ...

    def forward(self, plan: StepPlan) -> StepResult:
        """Computes one step. Errors of single rows come back in the result; an exception fails the whole step.

        Steps come in the order of their plans. Tokens that are `IN_FLIGHT` are those that the step before sampled for
        the same table row. Raises StepCancelled when `cancel` has broken the step off.
        """
        ...

    def cancel(self, step: int) -> None:
        """Nobody wants the result of this step any more (nor of earlier ones): `forward` may break off, or go on.

        Called from another thread than `forward`.
        """
        ...

    def close(self) -> None:
        """Gives memory and threads back. May be called twice."""
        ...


def check_kind(features: Collection[str], *, embeds: bool) -> None:
    """Raises InvalidRequestError for text wanted of an embedding model, and for vectors wanted of another one."""
    if embeds == ("embeddings" in features):
        return
    if embeds:
        text = (
            "this model generates text and makes no embeddings: use POST /v1/chat/completions, /v1/completions or"
            " /generate, or serve an embedding model (a GGUF file that names its pooling)"
        )
    else:
        text = "this model makes embeddings and generates no text: use POST /v1/embeddings (in Python, LLM.embed)"
    raise InvalidRequestError(text, code="unsupported_endpoint")
