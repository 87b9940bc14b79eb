"""`LlamaCppBackend`: GGUF models through llama.cpp's low-level API.

KV lives in one unified cache of cells that carry sequence ids (kv/sequences.py decides which); each step is one
`llama_decode` after the `KvOp`s of its plan. The lengths of all sequences are kept beside it, so that a row whose
sequence does not end where the plan says fails alone, instead of leaving a hole that llama.cpp would not notice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.backends.base import Geometry, Progress
from weft.backends.llama_cpp.adapters import Adapters
from weft.backends.llama_cpp.batch import Batch
from weft.backends.llama_cpp.breaker import Breaker
from weft.backends.llama_cpp.gguf import first_file
from weft.backends.llama_cpp.library import MAX_SEQUENCES, load_library
from weft.backends.llama_cpp.loading import description, load_model, thread_count
from weft.backends.llama_cpp.pieces import HostPieces
from weft.backends.llama_cpp.vocabulary import Failures, Vocabulary
from weft.backends.sampler import choose, describe, log_softmax
from weft.backends.steps import StepCancelled, TokenPool
from weft.core.errors import ModelLoadError, SettingsError
from weft.core.plan import PIECE_TOKENS, TO_THE_END, Bools, Int32s, KvOp, StepPlan, StepResult

logger = logging.getLogger(__name__)

KvType = Literal["f16", "bf16", "q8_0", "q4_0"]

_KV_TYPES: dict[KvType, tuple[int, float]] = {  # ggml's number of the type, and bytes of one value
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q4_0": (2, 18 / 32),
}
RUNNING_SET = 8
"""What `http.max_concurrent_requests` is when it is `auto`: every further row slows all the others here."""
LOGITS_AT_ONCE = 8_000_000
"""Prompt log probabilities are computed for so many logits at a time (32 MB in float32)."""


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """Args of the engine.

    Attributes:
        num_sequences: ids, 1 to 256.
        batch_tokens: most prompt tokens of one step.
        batch_rows: most rows of one step.
        threads: CPU threads; None: one for a small model, else those that this process may use.
        gpu_layers: layers on the GPU; None: llama.cpp's own choice (all, where it was built for one).
        flash_attention: None: llama.cpp's own choice.
        kv_type: number format of K and V.
        host_pieces: KV may move to host memory; takes one sequence id, and cells for one piece.
    """

    num_sequences: int = 32
    batch_tokens: int = 512
    batch_rows: int = RUNNING_SET
    threads: int | None = None
    gpu_layers: int | None = None
    flash_attention: bool | None = None
    kv_type: KvType = "f16"
    host_pieces: bool = False


class LlamaCppBackend:
    """See the module's docstring. `path` is a GGUF file, or the first one of several; `lora` the adapters by name."""

    name = "llama_cpp"
    features = frozenset({"logprobs", "prompt_logprobs", "logit_bias", "penalties", "lora"})

    def __init__(
        self, path: Path, options: LlamaCppOptions | None = None, lora: Mapping[str, Path] | None = None
    ) -> None:
        self._path = path
        self._options = options or LlamaCppOptions()
        most = MAX_SEQUENCES - self._options.host_pieces
        if not 1 <= self._options.num_sequences <= most:
            reason = " with kv_cache.host_memory_mb, which needs one itself" if self._options.host_pieces else ""
            raise SettingsError(
                f"backend.llama_cpp.n_seq_max: {self._options.num_sequences}: must be 1 to {most}{reason}"
            )
        self._library = load_library()
        self._adapters = Adapters(self._library, lora or {})
        self._model: Any = None
        self._context: Any = None
        self._memory: Any = None
        self._batch: Batch
        self._vocab_size = 0
        self._metadata: dict[str, Any] = {}
        self._lengths: list[int] = []
        self._breaker = Breaker()
        self._tokens = TokenPool()

    # ---- life -------------------------------------------------------------------------------------------------

    def load(self, progress: Progress | None = None) -> Geometry:
        """Reads the model. Raises ModelLoadError."""
        library, options = self._library, self._options
        self._path, self._metadata = first_file(self._path)
        self._model = load_model(library, self._path, options.gpu_layers, progress)
        if not library.llama_model_has_decoder(self._model) or library.llama_model_has_encoder(self._model):
            raise ModelLoadError(f"{self._path}: an encoder, which generates no text")
        self._adapters.load(self._model)
        return self._geometry()

    def allocate_kv(self, num_slots: int) -> None:
        """Makes the context with its cells; a second call replaces it."""
        library, options = self._library, self._options
        if self._context is not None:
            library.llama_free(self._context)
        rows = min(options.batch_rows, options.num_sequences)
        kv_type, _ = _KV_TYPES[options.kv_type]
        params = library.llama_context_default_params()
        params.n_ctx = num_slots + (PIECE_TOKENS if options.host_pieces else 0)
        params.n_batch = options.batch_tokens + rows
        params.n_ubatch = options.batch_tokens
        params.n_seq_max = options.num_sequences + options.host_pieces
        params.n_threads = params.n_threads_batch = thread_count(library, self._model, options.threads)
        params.type_k = params.type_v = kv_type
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        if options.flash_attention is not None:
            params.flash_attn_type = int(options.flash_attention)
        elif options.kv_type in ("q8_0", "q4_0"):
            params.flash_attn_type = 1  # a quantised V needs it
        self._context = None
        with Failures() as failures:
            context = library.llama_init_from_model(self._model, params)
        if not context:
            raise ModelLoadError(f"{self._path}: no context of {num_slots} tokens: {failures.reason}")
        self._context = context
        self._adapters.reset()
        self._memory = library.llama_get_memory(self._context)
        self._breaker.install(library, self._context)
        self._batch = Batch(library, params.n_batch)
        self._lengths = [0] * options.num_sequences
        self._pieces = HostPieces(library, self._context, self._memory, scratch=options.num_sequences)

    def close(self) -> None:
        """Gives the model and its cells back."""
        if self._context is not None:
            self._library.llama_free(self._context)
        self._adapters.close()
        if self._model is not None:
            self._library.llama_model_free(self._model)
        self._context = self._model = None

    # ---- steps ------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> StepResult:
        """Computes one step. Raises StepCancelled when `cancel` has broken it off."""
        assert plan.sequences is not None
        self.rearrange(plan.kv_ops)  # whatever becomes of the step: the ones after it build on them
        runs = self._breaker.begin(plan.step)
        if not runs:
            raise StepCancelled(f"step {plan.step} was not begun")
        self._tokens.resolve(plan)
        result = StepResult(np.full(plan.num_rows, -1, dtype=np.int32))
        starts = plan.seq_lens - plan.extend_lens
        for row, (sequence, start) in enumerate(zip(plan.sequences.tolist(), starts.tolist(), strict=True)):
            if self._lengths[sequence] != start:
                result.errors[row] = "the step that this one builds on was not computed"
        rows = np.array([row for row in range(plan.num_rows) if row not in result.errors], dtype=np.int64)
        if len(rows):
            self._decode(plan, rows, result)
        self._tokens.store(plan, result.tokens)
        return result

    def cancel(self, step: int) -> None:
        """Breaks a step off before llama.cpp's next operation."""
        self._breaker.cancel(step)

    def _decode(self, plan: StepPlan, rows: np.ndarray[Any, Any], result: StepResult) -> None:
        assert plan.sequences is not None
        row_of_token = np.repeat(np.arange(plan.num_rows), plan.extend_lens)
        chosen = np.isin(row_of_token, rows) if len(rows) < plan.num_rows else np.ones(plan.num_tokens, dtype=np.bool_)
        wanted = _outputs(plan)
        sequences = plan.sequences[row_of_token]
        batch = self._batch.fill(plan.token_ids[chosen], plan.positions[chosen], sequences[chosen], wanted[chosen])
        self._adapters.use(self._context, plan.adapter)
        code = self._library.llama_decode(self._context, batch)
        if code:
            for row in rows.tolist():
                self._cut(int(plan.sequences[row]), int(plan.seq_lens[row] - plan.extend_lens[row]))
            if code == 2:
                raise StepCancelled(f"step {plan.step} was broken off")
            reason = "found no room for the step's KV" if code == 1 else f"failed with code {code}"
            raise RuntimeError(f"llama_decode {reason}")
        for row in rows.tolist():
            self._lengths[int(plan.sequences[row])] = int(plan.seq_lens[row])
        outputs = wanted & chosen
        count = int(outputs.sum())
        if count:
            pointer = self._library.llama_get_logits(self._context)
            logits = np.ctypeslib.as_array(pointer, shape=(count, self._vocab_size))
            place = np.cumsum(outputs) - 1  # of a token, its row of logits
            self._choose(plan, rows, logits, place, result)

    def _choose(
        self, plan: StepPlan, rows: np.ndarray[Any, Any], logits: Any, place: np.ndarray[Any, Any], result: StepResult
    ) -> None:
        """Tokens and log probabilities from logits float32 [n, vocabulary]; `place` int [T] is where a token's are."""
        taken = set(rows.tolist())
        last = np.cumsum(plan.extend_lens) - 1
        sampling = [row for row in plan.sampling if row.row in taken]
        if sampling:
            which = place[last[[row.row for row in sampling]]]
            run = len(which) == len(logits)  # all of them, in order: no copy
            choices = choose(logits if run else logits[which], sampling)
            emitting = [row.row for row in sampling]
            result.tokens[emitting] = choices.tokens
            result.logprobs.update({emitting[index]: entry for index, entry in choices.logprobs.items()})
            result.errors.update({emitting[index]: message for index, message in choices.errors.items()})
        at_once = max(1, LOGITS_AT_ONCE // self._vocab_size)
        for row, asked in plan.prompt_logprobs.items():
            if row not in taken:
                continue
            first = int(last[row] - plan.extend_lens[row] + 1)
            entries = []
            for start in range(0, len(asked.targets), at_once):
                targets = asked.targets[start : start + at_once]
                these = place[first + start : first + start + len(targets)]
                entries += describe(log_softmax(logits[these]), targets, [asked.top_k] * len(targets))
            result.prompt_logprobs[row] = entries

    def rearrange(self, ops: tuple[KvOp, ...]) -> None:
        """Changes which cells belong to which sequences."""
        library = self._library
        for op in ops:
            if op.kind == "copy":
                library.llama_memory_seq_cp(self._memory, op.source, op.sequence, op.start, op.end)
                self._lengths[op.sequence] = max(self._lengths[op.sequence], op.end)
            elif op.kind == "save":
                self._pieces.save(op.piece, op.sequence, op.start, op.end)
            elif op.kind == "load":
                self._load_piece(op)
            elif op.kind == "drop":
                self._pieces.drop(op.piece)
            elif op.end == TO_THE_END:
                self._cut(op.sequence, op.start)
            else:  # a copy fills the gap again
                library.llama_memory_seq_rm(self._memory, op.sequence, op.start, op.end)

    def _load_piece(self, op: KvOp) -> None:
        """A sequence without the piece keeps its length, so its row fails alone."""
        if self._lengths[op.sequence] == op.start and self._pieces.load(op.piece, op.sequence, op.start, op.end):
            self._lengths[op.sequence] = op.end
        else:
            logger.error("KV at [%d, %d) could not be brought back from host memory", op.start, op.end)

    def _cut(self, sequence: int, length: int) -> None:
        """The sequence keeps positions below `length`; none where the model cannot cut: its row then fails alone."""
        if not self._library.llama_memory_seq_rm(self._memory, sequence, length, -1):
            self._library.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            length = 0
        self._lengths[sequence] = min(self._lengths[sequence], length)

    # ---- facts ------------------------------------------------------------------------------------------------

    def _geometry(self) -> Geometry:
        library, model = self._library, self._model
        vocabulary = Vocabulary(self._path, self._metadata, model)
        self._vocab_size = vocabulary.size
        layers = library.llama_model_n_layer(model)
        return Geometry(
            num_layers=layers,
            kv_bytes_per_token=self._kv_bytes_per_token(layers),
            max_context_tokens=library.llama_model_n_ctx_train(model),
            vocab_size=self._vocab_size,
            eos_token_ids=vocabulary.ending_ids,
            description=f"{description(library, model)}, KV in {self._options.kv_type}",
            dtype=self._options.kv_type,
            running_set=RUNNING_SET,
            num_sequences=self._options.num_sequences,
            shares_prefixes=not self._keeps_state(),
            max_step_tokens=self._options.batch_tokens,
            piece_tokens=self._piece_tokens() if self._options.host_pieces else None,
        )

    def _keeps_state(self) -> bool:
        """Whether layers keep a state of the whole sequence, which cannot be cut or continued from the middle."""
        library, model = self._library, self._model
        keeps = bool(library.llama_model_is_recurrent(model) or library.llama_model_is_hybrid(model))
        if keeps:
            logger.warning(
                "%s: a model with recurrent layers: a conversation goes on where it ended, nothing else is reused",
                self._path,
            )
        return keeps

    def _piece_tokens(self) -> int | None:
        """Longest piece that llama.cpp saves wholly: of a sequence, it leaves out what a sliding window cannot see."""
        if self._metadata.get("general.architecture") == "llama4":
            return None  # its windows begin at fixed places, in the middle of a piece too
        window = self._library.llama_model_n_swa(self._model)
        return min(PIECE_TOKENS, window) if window else PIECE_TOKENS

    def _kv_bytes_per_token(self, layers: int) -> int:
        """Bytes of K and V over all layers, from the file's own numbers."""
        library, model = self._library, self._model
        attention = f"{self._metadata.get('general.architecture')}.attention"
        heads = library.llama_model_n_head_kv(model)
        usual = library.llama_model_n_embd(model) // max(1, library.llama_model_n_head(model))
        keys = int(self._metadata.get(f"{attention}.key_length", usual))
        values = int(self._metadata.get(f"{attention}.value_length", usual))
        _, size = _KV_TYPES[self._options.kv_type]
        return max(1, round(layers * heads * (keys + values) * size))


def _outputs(plan: StepPlan) -> Bools:
    """bool [T], the tokens whose logits are wanted."""
    wanted = np.zeros(plan.num_tokens, dtype=np.bool_)
    ends: Int32s = np.cumsum(plan.extend_lens)
    wanted[ends[plan.emits] - 1] = True
    for row, asked in plan.prompt_logprobs.items():
        first = int(ends[row] - plan.extend_lens[row])
        wanted[first : first + len(asked.targets)] = True
    return wanted
