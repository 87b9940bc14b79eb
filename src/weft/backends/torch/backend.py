"""`TorchBackend`: the Backend protocol on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.backends.base import Geometry, Progress
from weft.backends.checkpoint import Checkpoint
from weft.backends.steps import Cancellation, TokenPool
from weft.backends.torch.attention import ATTENTION_KINDS, KVPool, SdpaAttention
from weft.backends.torch.batch import BatchBuilder
from weft.backends.torch.config import NotNativeError, read_config
from weft.backends.torch.loader import DTYPES, check_fit, load_weights
from weft.backends.torch.models import Decoder, LogitsOf, Model
from weft.backends.torch.sampler import choose, describe, log_softmax
from weft.core.errors import SettingsError
from weft.core.plan import Int64s, StepPlan, StepResult, TokenLogprobs

DTYPE_NAMES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CUDA_KV_SHARE = 0.8  # the rest is for activations and logits
SMALL_MODEL_BYTES = 64 * 2**20
"""Below this a second thread costs more at every barrier than it computes (docs/benchmarks.md)."""

LOGITS_AT_ONCE = 8_000_000
"""Prompt log probabilities are computed for so many logits at a time (32 MB in float32)."""


class TorchBackend:
    """Runs Hugging Face checkpoints: native decoders where there is one, else `transformers` through the adapter.

    Args:
        model_path: checkpoint folder.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one, else CPU) or a PyTorch device name.
        threads: CPU threads of PyTorch, for the whole process; None: one for a small model, else PyTorch's choice.
        attention: "auto" or one of `ATTENTION_KINDS`.

    Raises:
        SettingsError: a value that is not allowed, naming those that are.
    """

    name = "torch"
    features = frozenset({"logprobs", "prompt_logprobs", "logit_bias", "penalties"})

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        attention: str = "auto",
    ) -> None:
        _check_choice("dtype", dtype, ("auto", *DTYPE_NAMES))
        _check_choice("attention", attention, ("auto", *ATTENTION_KINDS))
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise SettingsError(f"threads: {threads!r} is not allowed (allowed: a whole number from 1, or null)")
        self._path, self._dtype_name, self._threads = Path(model_path), dtype, threads
        self._device = _pick_device(device)
        self._attention_kind = ATTENTION_KINDS["sdpa" if attention == "auto" else attention]
        self._model: Model | None = None
        self._attention: SdpaAttention | None = None
        self._builder: BatchBuilder | None = None
        self._tokens = TokenPool()
        self._cancellation = Cancellation()

    def load(self, progress: Progress | None = None) -> Geometry:
        """Reads the model. Raises ModelLoadError, naming the file, tensor or architecture at fault."""
        checkpoint = Checkpoint.open(self._path)
        threads = self._threads
        if threads is None and checkpoint.total_bytes < SMALL_MODEL_BYTES:
            threads = 1
        if threads is not None:
            torch.set_num_threads(threads)
        dtype = self._pick_dtype(checkpoint)
        with torch.inference_mode():
            model, kind = self._load_model(checkpoint, dtype, progress)
        self._model = model
        self._builder = BatchBuilder(model.windows, model.kv_dtype, self._device)
        widths = sum(shape.width for shape in model.kv_shapes)
        dtype_name = str(dtype).removeprefix("torch.")
        return Geometry(
            num_layers=len(model.kv_shapes),
            kv_bytes_per_token=widths * model.kv_dtype.itemsize,
            max_context_tokens=checkpoint.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            description=f"{checkpoint.architecture}, {len(model.kv_shapes)} layers, {dtype_name}, {kind}",
            dtype=dtype_name,
            **self._device_facts(),
        )

    def allocate_kv(self, num_slots: int) -> None:
        """Makes the KV pool; a second call replaces it."""
        model = self._loaded()
        self._attention = None  # gives the old pool back before the new one is made
        pool = KVPool(model.kv_shapes, num_slots, model.kv_dtype, self._device)
        self._attention = self._attention_kind(pool, self._cancellation)

    def forward(self, plan: StepPlan) -> StepResult:
        """Computes one step."""
        with torch.inference_mode():
            return self._forward(plan)

    def _forward(self, plan: StepPlan) -> StepResult:
        model = self._loaded()
        if self._attention is None or self._builder is None:
            raise RuntimeError("forward was called before allocate_kv")
        self._tokens.resolve(plan)
        ends = np.cumsum(plan.extend_lens)
        emitting = [row.row for row in plan.sampling]
        wanted: list[Int64s] = [np.asarray(ends[emitting] - 1, np.int64)] if emitting else []
        for row, asked in plan.prompt_logprobs.items():
            first = int(ends[row] - plan.extend_lens[row])
            wanted.append(np.arange(first, first + len(asked.targets), dtype=np.int64))
        places = np.concatenate(wanted) if wanted else np.empty(0, np.int64)
        batch = self._builder.build(plan)
        logits_of = model.forward(batch, self._attention, torch.from_numpy(places).to(self._device))
        tokens = np.full(plan.num_rows, -1, np.int32)
        result = StepResult(tokens, prompt_logprobs=self._prompt_logprobs(plan, logits_of, len(emitting)))
        if emitting:
            choices = choose(logits_of(0, len(emitting)), plan.sampling)
            tokens[emitting] = choices.tokens
            result.logprobs.update({emitting[index]: entry for index, entry in choices.logprobs.items()})
            result.errors.update({emitting[index]: message for index, message in choices.errors.items()})
        self._tokens.store(plan, tokens)
        return result

    def cancel(self, step: int) -> None:
        """Breaks a step off before its next layer."""
        self._cancellation.cancel(step)

    def close(self) -> None:
        """Gives the model and the pool back."""
        self._model = self._attention = self._builder = None

    def _device_facts(self) -> dict[str, Any]:
        """On CUDA, a larger running set, and KV in the memory that the weights have left free."""
        if self._device.type != "cuda":
            return {}
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return {"running_set": 256, "plans_ahead": True, "kv_budget_bytes": int(free_bytes * CUDA_KV_SHARE)}

    def _loaded(self) -> Model:
        if self._model is None:
            raise RuntimeError("the torch backend was used before load, or after close")
        return self._model

    def _load_model(self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None) -> tuple[Model, str]:
        try:
            config = read_config(checkpoint)
        except NotNativeError:
            from weft.backends.torch.adapter import load_adapter  # imports transformers, which natives never need

            return load_adapter(checkpoint, dtype, self._device, progress), "transformers"
        outline = Decoder(config, dtype, torch.device("meta"))
        check_fit(outline.modules(), checkpoint, tied_head=config.tied)
        decoder = Decoder(config, dtype, self._device)
        load_weights(decoder.modules(), checkpoint, progress)
        decoder.ready()
        return decoder, "native"

    def _pick_dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        if self._dtype_name != "auto":
            return DTYPE_NAMES[self._dtype_name]
        name = checkpoint.dtype_name
        if name is None:
            first = next((info.dtype for info in checkpoint.tensors.values() if info.dtype in DTYPES), "F32")
            name = str(DTYPES[first]).removeprefix("torch.")
        return DTYPE_NAMES.get(name, torch.float32)

    def _prompt_logprobs(self, plan: StepPlan, logits_of: LogitsOf, offset: int) -> dict[int, list[TokenLogprobs]]:
        """Log probabilities of the prompt's tokens; `offset` logits precede theirs."""
        at_once = max(1, LOGITS_AT_ONCE // self._loaded().vocab_size)
        found: dict[int, list[TokenLogprobs]] = {}
        for row, asked in plan.prompt_logprobs.items():
            targets = torch.from_numpy(asked.targets.astype(np.int64)).to(self._device)
            entries: list[TokenLogprobs] = []
            for start in range(0, len(targets), at_once):
                some = targets[start : start + at_once]
                scores = log_softmax(logits_of(offset + start, offset + start + len(some)))
                entries += describe(scores, some, [asked.top_k] * len(some))
            found[row] = entries
            offset += len(targets)
        return found


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SettingsError(f"{name}: {value!r} is not allowed (allowed: {', '.join(allowed)})")


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device: {name!r} is not allowed (allowed: auto, cpu, cuda, cuda:N)") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device: {name!r} is not available (PyTorch {torch.__version__} finds no CUDA device)")
    return device
