"""Runs any decoder-only architecture of the `transformers` library with our paged attention in place of its own.

The library's modules compute everything but attention: they look attention up by name in its `AttentionInterface`,
where `paged_attention` stands under `INTERFACE_NAME`. All sequences of a step go through as one flat batch [1, T] with
explicit positions; the library's cache and masks stay unused. Under a name without a mask function the library builds
no mask (transformers.masking_utils).

Not every architecture keeps to that interface, so nothing is taken on trust: on loading, a short text is run by the
library alone and by us in pieces, and the logits must agree. What differs (state-space layers, positions in masks,
attention outside the interface) is refused by name. `transformers` is imported nowhere else.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from weft.backends.base import Progress
from weft.backends.checkpoint import Checkpoint
from weft.backends.steps import Cancellation
from weft.backends.torch.attention import AttentionOptions, KVPool, KVShape, SdpaAttention, attend
from weft.backends.torch.batch import BatchBuilder, StepBatch
from weft.backends.torch.models import LogitsOf
from weft.core.errors import ModelLoadError
from weft.core.plan import StepPlan

INTERFACE_NAME = "weft_paged"
OWNER_ATTRIBUTE = "_weft_adapter"
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
PROBE_TOKENS = 11
PROBE_CHUNKS = (6, 4, 1)
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Allowed mean difference of logits, as a share of their spread. A wrong computation is off by about 1; the mean, not
the largest, because in half precision a single expert of a mixture may flip."""


@dataclass
class _Recording:
    """What the layers asked for while the model ran once; one entry per call of `paged_attention`."""

    shapes: list[KVShape] = field(default_factory=list)
    options: list[AttentionOptions] = field(default_factory=list)
    problem: str | None = None


class AdapterModel:
    """A `transformers` model as a `Model`. The n-th attention call of a forward pass is layer n of the KV pool."""

    def __init__(self, library_model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._library_model, self._device = library_model, device
        self.kv_dtype = dtype
        self.kv_shapes: tuple[KVShape, ...] = ()
        self.windows: tuple[int | None, ...] = ()
        self.vocab_size = 0
        self._keeps_logits = "logits_to_keep" in inspect.signature(library_model.forward).parameters
        self._recording: _Recording | None = None
        self._step: tuple[StepBatch, SdpaAttention] | None = None
        self._calls = 0
        for module in library_model.modules():
            setattr(module, OWNER_ATTRIBUTE, self)

    def forward(self, batch: StepBatch, attention: SdpaAttention, wanted: torch.Tensor) -> LogitsOf:
        """As `Model.forward`. The library's head runs on all wanted tokens at once."""
        self._step, self._calls = (batch, attention), 0
        try:
            logits = self._run(batch.token_ids, batch.positions, wanted)
        finally:
            self._step = None
        return lambda start, stop: logits[start:stop].float()

    def record(self, token_ids: torch.Tensor) -> _Recording:
        """Runs one text through and notes what its layers ask of attention."""
        self._recording = recording = _Recording()
        try:
            self._run(token_ids, torch.arange(len(token_ids), device=self._device), torch.zeros(1, dtype=torch.int64))
        finally:
            self._recording = None
        return recording

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        keep = {"logits_to_keep": wanted.to(self._device)} if self._keeps_logits else {}
        result = self._library_model(
            input_ids=token_ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, **keep
        )
        logits: torch.Tensor = result.logits[0]
        return logits if self._keeps_logits else logits[wanted]

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """queries [heads, T, dim], keys and values [kv heads, T, dim] -> [T, heads * value dim]."""
        shape = KVShape(keys.shape[0], keys.shape[2], values.shape[2])
        if self._recording is not None:
            self._recording.shapes.append(shape)
            self._recording.options.append(options)
            return _plain_attention(queries, keys, values, options)
        if self._step is None:
            raise RuntimeError("paged attention was called outside of a step")
        batch, attention = self._step
        layer = self._calls
        self._calls += 1
        records = torch.cat((keys.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)), 1)
        return attention(batch, layer, queries.transpose(0, 1), records, options)

    def note_problem(self, problem: str) -> None:
        """Remembers, while recording, why this model cannot be run."""
        if self._recording is not None and self._recording.problem is None:
            self._recording.problem = problem


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention function: query [1, heads, T, dim] -> [1, T, heads, value dim]."""
    owner: AdapterModel = getattr(module, OWNER_ATTRIBUTE)
    if attention_mask is not None:
        owner.note_problem("it brings an attention mask of its own")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        owner.note_problem("it has attention that is not causal")
    if query.shape[2] != key.shape[2]:
        owner.note_problem("it has attention over something else than its own tokens")
    options = AttentionOptions(
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=int(sliding_window) if sliding_window else None,
        softcap=softcap,
        sinks=s_aux,
    )
    attended = owner.attend(query[0], key[0], value[0], options)
    return attended.view(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Causal attention over one short text, without a pool."""
    length, group = queries.shape[1], queries.shape[0] // keys.shape[0]
    mask = torch.full((length, length), float("-inf"), dtype=queries.dtype, device=queries.device).triu_(1)
    grouped = queries.unflatten(0, (keys.shape[0], group))
    sides = [part.unsqueeze(1).expand(-1, group, -1, -1) for part in (keys, values)]
    attended = attend(grouped, sides[0], sides[1], mask, options, folded=False)
    return attended.permute(2, 0, 1, 3).reshape(length, -1)


def load_adapter(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> AdapterModel:
    """Loads and proves a model. Raises ModelLoadError naming the architecture and what does not fit."""
    name = checkpoint.architecture
    if importlib.util.find_spec("transformers") is None:
        raise ModelLoadError(
            f"{name} has no native decoder and needs the transformers library (pip install transformers)"
        )
    model_class, config = _find_class(checkpoint)
    _check_config(name, model_class, config)
    total = checkpoint.total_bytes
    if progress is not None:
        progress(0, total)
    with torch.inference_mode(False):
        library_model = _load_library_model(checkpoint, model_class, dtype).to(device).eval()
    try:
        with torch.inference_mode():
            model = _prove(checkpoint, library_model, dtype, device)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _refusal(name, f"running it failed: {_first_line(error)}") from error
    if progress is not None:
        progress(total, total)
    return model


def _find_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The library's model class and configuration for this checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = checkpoint.architecture
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except (ValueError, KeyError, OSError, ImportError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"architecture {name} is not supported: it is neither native nor a causal language model "
                             f"of the installed transformers library ({_first_line(error)})") from error  # fmt: skip
    if model_class.__name__ != name:
        raise ModelLoadError(f"architecture {name} is not supported: for this configuration transformers "
                             f"has only {model_class.__name__} as a causal language model")  # fmt: skip
    return model_class, config


def _check_config(name: str, model_class: Any, config: Any) -> None:
    """Refuses, before any weight is read, what cannot work."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is an encoder-decoder model")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise _refusal(name, "its forward pass takes no position_ids")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in SUPPORTED_LAYER_TYPES:
            raise _refusal(name, f"it has layers of type {kind!r} (supported: {', '.join(SUPPORTED_LAYER_TYPES)})")
    if getattr(text, "attention_chunk_size", None):
        raise _refusal(name, "its attention works in chunks (attention_chunk_size)")
    if getattr(config, "quantization_config", None):
        raise _refusal(name, "the checkpoint is quantised (quantization_config)")


def _load_library_model(checkpoint: Checkpoint, model_class: Any, dtype: torch.dtype) -> Any:
    """The library's model with its own attention. Everything it finds wrong becomes a ModelLoadError."""
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = model_class.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, OSError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{checkpoint.path}: transformers cannot load {checkpoint.architecture}: {error}"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            first = sorted(str(key) for key in info[kind])[0]
            raise ModelLoadError(f"{checkpoint.path}: {kind.replace('_keys', '')} tensor {first!r} "
                                 f"for {checkpoint.architecture}")  # fmt: skip
    return model


def _prove(checkpoint: Checkpoint, library_model: Any, dtype: torch.dtype, device: torch.device) -> AdapterModel:
    """Compares the library's own run of a short text with ours, which takes it in pieces from scattered slots."""
    from transformers import AttentionInterface

    name = checkpoint.architecture
    text = library_model.config.get_text_config()
    token_ids = torch.arange(3, 3 + PROBE_TOKENS, device=device) * 7 % text.vocab_size
    expected = library_model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    AttentionInterface.register(INTERFACE_NAME, paged_attention)
    library_model.set_attn_implementation(INTERFACE_NAME)
    model = AdapterModel(library_model, dtype, device)
    recording = model.record(token_ids)
    _check_recording(name, recording, text)
    model.kv_shapes = tuple(recording.shapes)
    model.windows = tuple(options.window for options in recording.options)
    model.vocab_size = expected.shape[-1]
    found = torch.cat(list(_run_in_pieces(model, token_ids.cpu().numpy().astype(np.int32), device)))
    spread = float(expected.std()) or 1.0
    difference = float((found - expected).abs().mean()) / spread
    if not difference <= PROBE_TOLERANCE.get(dtype, 1e-3):
        raise _refusal(
            name, f"with paged attention its logits come out different (by {difference:.2g} of their spread)"
        )
    return model


def _check_recording(name: str, recording: _Recording, text: Any) -> None:
    if recording.problem is not None:
        raise _refusal(name, recording.problem)
    calls, layers = len(recording.shapes), text.num_hidden_layers
    if calls == 0:
        raise _refusal(name, "its attention does not go through the library's attention interface")
    if calls != layers:
        raise _refusal(name, f"{calls} attention calls were seen for {layers} layers (hybrid or state-space layers?)")
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ["full_attention"] * layers
    for layer, (kind, options) in enumerate(zip(kinds, recording.options, strict=True)):
        if kind == "sliding_attention" and options.window is None:
            raise _refusal(name, f"layer {layer} has a sliding window that it does not tell its attention function")
    untold = all(options.window is None for options in recording.options)
    if untold and getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None):
        raise _refusal(name, "its sliding window is not told to its attention function")


def _run_in_pieces(model: AdapterModel, token_ids: np.ndarray, device: torch.device) -> Any:
    """Logits of the text, computed in chunks over a scattered table."""
    slots = np.arange(PROBE_TOKENS, dtype=np.int32)[::-1] * 2 % (2 * PROBE_TOKENS)
    attention = SdpaAttention(KVPool(model.kv_shapes, 2 * PROBE_TOKENS, model.kv_dtype, device), Cancellation())
    builder = BatchBuilder(model.windows, model.kv_dtype, device)
    start = 0
    for step, count in enumerate(PROBE_CHUNKS):
        end = start + count
        plan = StepPlan(
            step=step,
            mode="extend",
            request_ids=np.zeros(1, np.int64),
            table_rows=np.zeros(1, np.int32),
            extend_lens=np.array([count], np.int32),
            seq_lens=np.array([end], np.int32),
            token_ids=token_ids[start:end],
            positions=np.arange(start, end, dtype=np.int32),
            slots=slots[start:end],
            page_table=slots[None, :end],
            emits=np.zeros(1, np.bool_),
            sampling=(),
        )
        yield model.forward(builder.build(plan), attention, torch.arange(count))(0, count)
        start = end


def _refusal(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"architecture {name} is not supported: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
