"""`LlamaCppEmbedder`: one vector per text from GGUF embedding models, through llama.cpp's low-level API.

Numbers of pooling types, and what llama.cpp ends the process for, are those of its `include/llama.h` and
`src/llama-context.cpp` ("encode", "decode", "output_reserve"). What a file that names no pooling means is decided here:
llama.cpp takes NONE, and its server then refuses OpenAI's endpoint. Encoders are pooled by the mean instead, which is
what sentence-transformers does with a model that says nothing; decoders are refused: they are no embedding models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.backends.base import Progress
from weft.backends.llama_cpp.batch import Batch
from weft.backends.llama_cpp.breaker import Breaker
from weft.backends.llama_cpp.gguf import first_file
from weft.backends.llama_cpp.library import MAX_SEQUENCES, load_library
from weft.backends.llama_cpp.loading import description, load_model, thread_count
from weft.backends.llama_cpp.vocabulary import Failures
from weft.backends.steps import StepCancelled
from weft.core.errors import EngineError, InvalidRequestError, ModelLoadError, SettingsError
from weft.core.plan import Float32s, Int32s
from weft.core.vectors import normalised

Pooling = Literal["mean", "cls", "last"]

ENCODERS = frozenset(
    ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3")
    + ("eurobert", "gemma-embedding", "llama-embed", "t5encoder")
)
"""Architectures whose every token sees the whole text: they write none."""
MAX_INPUT_TOKENS = 8192
"""Longest text unless asked otherwise: that of OpenAI's embedding models. KV for 32,768 tokens may take gigabytes."""
OUTPUT_BYTES = 2 * 2**30
"""Where a text has to be computed in one piece, llama.cpp clears logits (float32) of all its tokens, wanted or not."""
_NONE, _RANK = 0, 4
_POOLINGS: dict[Pooling, int] = {"mean": 1, "cls": 2, "last": 3}
_NAMES: dict[int, Pooling] = {number: name for name, number in _POOLINGS.items()}


@dataclass(frozen=True, slots=True)
class EmbeddingFacts:
    """Facts of a loaded model.

    Attributes:
        dimensions: length of a vector.
        max_input_tokens: longest text.
        pooling: how the tokens' vectors become one: "mean", that of the first token ("cls") or of the last one.
        vocab_size: token ids are 0 to vocab_size - 1.
        num_layers: of the model.
        description: one line for people, such as "bert 33M F16, 12 layers, pooling: cls".
    """

    dimensions: int
    max_input_tokens: int
    pooling: Pooling
    vocab_size: int
    num_layers: int
    description: str


def is_embedding_model(metadata: Mapping[str, Any]) -> bool:
    """Whether a file's metadata are those of a model that writes no text: it names a pooling, or is an encoder.

    Rerankers (pooling RANK) are among them; `LlamaCppEmbedder.load` refuses them. Does not need llama-cpp-python.
    """
    return metadata.get("general.architecture") in ENCODERS or _named_pooling(metadata) != _NONE


class LlamaCppEmbedder:
    """Used by one thread at a time, but for `cancel`. Life: construct, `load`, `embed` as often as wanted, `close`.

    Texts share a batch of up to `batch_tokens` tokens, each under a sequence id of its own. A longer text has a batch
    for itself: with causal attention and pooling by the last token in parts of `batch_tokens`, since KV carries over;
    else in one piece, to which the context's buffers are sized.
    """

    def __init__(
        self,
        path: Path,
        threads: int | None = None,
        gpu_layers: int | None = None,
        batch_tokens: int = 512,
        max_sequences: int = 64,
        *,
        max_input_tokens: int | None = None,
        pooling: Pooling | None = None,
        flash_attention: bool | None = None,
    ) -> None:
        """`path` is a GGUF file, or any one of several.

        `threads`: None: one for a small model, else those that this process may use. `gpu_layers`: None: llama.cpp's
        own choice. `max_sequences`: most texts of one batch, 1 to 256. `max_input_tokens`: longest text; None:
        `MAX_INPUT_TOKENS`, or less where the output buffer would exceed `OUTPUT_BYTES`; never more than the model's
        context. `pooling`: None: the file's. `flash_attention`: None: llama.cpp's own choice. Errors: `SettingsError`.
        """
        if not 1 <= max_sequences <= MAX_SEQUENCES:
            raise SettingsError(f"max_sequences: {max_sequences}: must be 1 to {MAX_SEQUENCES}")
        for name, value in (("batch_tokens", batch_tokens), ("max_input_tokens", max_input_tokens)):
            if value is not None and value < 1:
                raise SettingsError(f"{name}: {value}: must be at least 1")
        self._path = path
        self._threads = threads
        self._gpu_layers = gpu_layers
        self._batch_tokens = batch_tokens
        self._max_sequences = max_sequences
        self._asked_input = max_input_tokens
        self._asked_pooling = pooling
        self._flash_attention = flash_attention
        self._library = load_library()
        self._model: Any = None
        self._context: Any = None
        self._breaker = Breaker()
        self._step = 0
        self._tainted = False
        self._facts: EmbeddingFacts

    # ---- life -------------------------------------------------------------------------------------------------

    def load(self, progress: Progress | None = None) -> EmbeddingFacts:
        """Reads the model and makes its context. Raises ModelLoadError, for rerankers before weights are read."""
        self._path, metadata = first_file(self._path)
        pooling = self._asked_pooling or _file_pooling(self._path, metadata)
        try:
            self._load_model(progress)
            self._facts = self._make_context(metadata, pooling)
        except BaseException:
            self.close()
            raise
        return self._facts

    def _load_model(self, progress: Progress | None) -> None:
        library = self._library
        self._model = model = load_model(library, self._path, self._gpu_layers, progress)
        self._encodes = bool(library.llama_model_has_encoder(model))
        if self._encodes and library.llama_model_has_decoder(model):
            raise ModelLoadError(f"{self._path}: llama.cpp computes no embeddings in models with encoder and decoder")

    def _make_context(self, metadata: Mapping[str, Any], pooling: Pooling) -> EmbeddingFacts:
        library = self._library
        vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        architecture = metadata.get("general.architecture")
        causal = architecture not in ENCODERS and metadata.get(f"{architecture}.attention.causal", True)
        splits = causal and pooling == "last"
        limit = self._input_limit(vocab_size, splits=splits)
        params = library.llama_context_default_params()
        # llama.cpp would abort if a text had more tokens than n_ubatch, if n_seq_max exceeded n_batch, or, where it
        # pools the mean, if n_ubatch were no multiple of n_seq_max.
        size = self._batch_tokens if splits else max(self._batch_tokens, limit)
        sequences = min(self._max_sequences, size)
        size = -(-size // sequences) * sequences
        params.n_batch = params.n_ubatch = size
        params.n_ctx = max(size, limit)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = thread_count(library, self._model, self._threads)
        params.embeddings = True
        params.pooling_type = _POOLINGS[pooling]
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        if self._flash_attention is not None:
            params.flash_attn_type = int(self._flash_attention)
        with Failures() as failures:
            context = library.llama_init_from_model(self._model, params)
        if not context:
            raise ModelLoadError(f"{self._path}: no context for texts of {limit} tokens: {failures.reason}")
        self._context = context
        self._memory = library.llama_get_memory(context)
        self._breaker.install(library, context)
        self._batch = Batch(library, size)
        self._sequences = params.n_seq_max
        if not self._memory or not library.llama_get_causal_attn(context):
            limit = min(limit, size)  # an architecture that is not causal, though neither it nor its file is known to
        return self._describe(limit, pooling, vocab_size)

    def _input_limit(self, vocab_size: int, *, splits: bool) -> int:
        """Tokens of the longest text."""
        trained: int = self._library.llama_model_n_ctx_train(self._model)  # positions beyond may not exist: an abort
        if self._asked_input is not None:
            return min(self._asked_input, trained)
        affordable = MAX_INPUT_TOKENS
        if not splits:
            affordable = min(affordable, max(self._batch_tokens, OUTPUT_BYTES // (4 * max(1, vocab_size))))
        return min(affordable, trained)

    def _describe(self, limit: int, pooling: Pooling, vocab_size: int) -> EmbeddingFacts:
        library, model = self._library, self._model
        return EmbeddingFacts(
            dimensions=library.llama_model_n_embd_out(model),
            max_input_tokens=limit,
            pooling=pooling,
            vocab_size=vocab_size,
            num_layers=library.llama_model_n_layer(model),
            description=f"{description(library, model)}, pooling: {pooling}",
        )

    def close(self) -> None:
        """Gives the model and its buffers back; may be called twice."""
        if self._context is not None:
            self._library.llama_free(self._context)
        if self._model is not None:
            self._library.llama_model_free(self._model)
        self._context = self._model = None

    # ---- texts ------------------------------------------------------------------------------------------------

    def embed(self, texts: Sequence[Int32s], step: int | None = None) -> list[Float32s | EngineError]:
        """One vector float32 [dimensions] of length 1 per text, in order. A text is its token ids, int32 [n], n >= 1.

        A text whose vector cannot be used (values not finite, or all zero) has an `EngineError` in its place; it spoils
        no other one. `step` tells `cancel` what to break off; it has to be larger than all before, None: the next one.

        Errors, all of them before anything is computed: `InvalidRequestError` for a text that is empty, too long (code
        "context_length_exceeded") or has a token id that does not exist. `StepCancelled` when broken off.
        """
        for index, text in enumerate(texts):
            self._check(index, text)
        self._step = self._step + 1 if step is None else step
        vectors: list[Float32s | EngineError] = []
        for group in self._groups(texts):
            vectors += self._vectors(group)
        return vectors

    def cancel(self, step: int | None = None) -> None:
        """Breaks off, from any thread, steps up to this one; None: the one that runs now, if any.

        A running step ends before llama.cpp's next operation; on a GPU, before its next batch.
        """
        self._breaker.cancel(self._step if step is None else step)

    def _check(self, index: int, text: Int32s) -> None:
        limit, vocab_size = self._facts.max_input_tokens, self._facts.vocab_size
        if not len(text):
            raise InvalidRequestError(f"input[{index}]: empty: it has no tokens", param="input")
        if len(text) > limit:
            message = f"input[{index}]: {len(text)} tokens: this model's limit is {limit} tokens per input"
            raise InvalidRequestError(message, param="input", code="context_length_exceeded")
        if int(text.min()) < 0 or int(text.max()) >= vocab_size:
            raise InvalidRequestError(f"input[{index}]: token ids must be 0 to {vocab_size - 1}", param="input")

    def _groups(self, texts: Sequence[Int32s]) -> Iterator[list[Int32s]]:
        """Texts that are computed together; a longer one than a batch is alone."""
        group: list[Int32s] = []
        tokens = 0
        for text in texts:
            if group and (tokens + len(text) > self._batch_tokens or len(group) == self._sequences):
                yield group
                group, tokens = [], 0
            group.append(text)
            tokens += len(text)
        if group:
            yield group

    def _vectors(self, texts: list[Int32s]) -> list[Float32s | EngineError]:
        """Vectors of texts that fit in one batch, or of one text.

        Attention gives other texts' tokens the weight 0, but 0 times NaN is NaN: a text that overflows takes those with
        it that share its batch, or find its KV in cells since freed. So all that failed are computed again in halves.
        """
        raw = self._compute(texts)
        good = np.isfinite(raw).all(axis=1)
        vectors = [normalised(vector) for vector in raw]
        if good.all():
            return vectors
        self._tainted = True
        suspects = np.flatnonzero(~good)
        if len(texts) > 1:
            half = (len(suspects) + 1) // 2
            for part in (suspects[:half], suspects[half:]):
                again = self._vectors([texts[index] for index in part]) if len(part) else []
                for index, vector in zip(part, again, strict=True):
                    vectors[index] = vector
        return vectors

    def _compute(self, texts: list[Int32s]) -> Float32s:
        """Vectors as llama.cpp gives them, float32 [texts, dimensions]. Raises StepCancelled."""
        library, context, size = self._library, self._context, self._batch.size
        tokens = np.concatenate(texts)
        positions = np.concatenate([np.arange(len(text), dtype=np.int32) for text in texts])
        sequences = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
        outputs = np.ones(len(tokens), dtype=np.bool_)  # pooling wants all of them
        run = library.llama_encode if self._encodes or not self._memory else library.llama_decode
        if self._memory:
            library.llama_memory_clear(self._memory, self._tainted)  # True: the values too, not only whose they are
        self._tainted = False
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            if not self._breaker.begin(self._step):
                raise StepCancelled(f"step {self._step} was broken off")
            code = run(context, self._batch.fill(tokens[part], positions[part], sequences[part], outputs[part]))
            if code == 2:
                raise StepCancelled(f"step {self._step} was broken off")
            if code:
                raise RuntimeError(f"{run.__name__} failed with code {code}")
        vectors = np.empty((len(texts), self._facts.dimensions), dtype=np.float32)
        for index, vector in enumerate(vectors):
            pointer = library.llama_get_embeddings_seq(context, index)
            if not pointer:
                raise RuntimeError(f"llama.cpp has no embedding of sequence {index}")
            ctypes.memmove(vector.ctypes.data, pointer, vector.nbytes)
        return vectors


def _named_pooling(metadata: Mapping[str, Any]) -> int:
    """The file's number of the pooling type; NONE where it names none."""
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", _NONE)
    return number if isinstance(number, int) and number in (*_NAMES, _RANK) else _NONE


def _file_pooling(path: Path, metadata: Mapping[str, Any]) -> Pooling:
    number = _named_pooling(metadata)
    if number == _RANK:
        raise ModelLoadError(f"{path}: a reranker: it scores pairs of texts (pooling RANK) and makes no embeddings")
    if number in _NAMES:
        return _NAMES[number]
    if metadata.get("general.architecture") in ENCODERS:
        return "mean"
    raise ModelLoadError(f"{path}: not an embedding model: the file names no pooling ({{arch}}.pooling_type)")
