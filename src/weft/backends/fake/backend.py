"""`FakeBackend`: its "KV" of a token is a number made of token, position and adapter; the next token is a hash of all.

A row reads every slot of its page table, so one wrong, stale or missing slot anywhere changes the text: what the real
attention would do, at a millionth of the cost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from weft.backends.base import Geometry, Progress
from weft.backends.fake.cells import FakeCells
from weft.backends.steps import Cancellation, TokenPool
from weft.core.errors import EngineError, SettingsError
from weft.core.media import Modality
from weft.core.plan import Float32s, Int32s, MediaRun, SamplingRow, StepPlan, StepResult, TokenLogprobs, UInt64s
from weft.core.vectors import normalised
from weft.media.hashing import media_digest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MEDIA_TOKENS = 6
FAULTS = ("raise_on_token", "nan_on_token", "exit_on_token", "hang_on_token")


def mix(values: UInt64s) -> UInt64s:
    """splitmix64's finisher (Steele, Lea and Flood, 2014), element by element."""
    with np.errstate(over="ignore"):
        z = values * _GOLDEN + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def kv_values(tokens: Int32s, positions: Int32s, adapter: int = 0) -> UInt64s:
    """uint64 [T], what the fake stores for each token at its position, with this adapter."""
    places = positions.astype(np.uint64) | np.uint64(adapter << 24)
    return mix((places << np.uint64(32)) | tokens.astype(np.uint64))


def media_values(run: MediaRun) -> UInt64s:
    """uint64 [run.count], what the fake sees of a medium in each of its tokens: something of all samples."""
    seen = np.frombuffer(media_digest(run.medium.kind, run.medium.samples)[:8], dtype="<u8")
    with np.errstate(over="ignore"):
        return mix(seen + np.arange(run.start, run.start + run.count, dtype=np.uint64))


def next_token(history: UInt64s, vocab: int, *, seed: int = 0, index: int = 0, banned: tuple[int, ...] = ()) -> int:
    """The token that follows stored values `history` (uint64 [n], all of the sequence)."""
    total = np.add.reduce(history, dtype=np.uint64)
    salt = mix(np.array([seed, index], dtype=np.uint64))
    with np.errstate(over="ignore"):
        state = mix(np.array([total ^ salt[0] ^ (salt[1] >> np.uint64(1))], dtype=np.uint64))
    while True:
        token = int(state[0] % np.uint64(vocab))
        if token not in banned:
            return token
        state = mix(state)


def embedding(history: UInt64s, dimensions: int) -> Float32s:
    """The vector, float32 [dimensions] of length 1, of a prompt with stored values `history` (uint64 [n])."""
    total = np.add.reduce(history, dtype=np.uint64)
    with np.errstate(over="ignore"):
        values = mix(total + np.arange(1, dimensions + 1, dtype=np.uint64))
    vector = normalised((values / np.float64(2**63) - 1.0).astype(np.float32))
    assert not isinstance(vector, EngineError)
    return vector


class FakeBackend:
    """See the module's docstring.

    Args:
        vocab_size: tokens are 0 to vocab_size - 1.
        max_context_tokens: longest sequence.
        eos_token_ids: reported in the geometry; they come up by chance, once in `vocab_size` tokens each.
        tokens_per_s: new tokens computed a second; None: no waiting.
        faults: any of `FAULTS` -> token id: a row that computes this token fails the step, fails alone, kills the
            process, or hangs the step.
        modalities: of media that it takes; `MEDIA_TOKENS` tokens stand for each.
        embeddings: dimensions of the vectors that it makes, instead of tokens; None: tokens.
        num_sequences: stores KV under so many sequence ids, as llama.cpp does; None: in slots.
        shares_prefixes: with sequences; False: a sequence has one state, as with recurrent layers.
        sleep: how to let time pass; a virtual clock's `advance` in tests. None: really, until the step is cancelled.
    """

    name = "fake"
    features: frozenset[str] = frozenset({"logprobs", "prompt_logprobs", "lora"})

    def __init__(
        self,
        *,
        vocab_size: int = 32000,
        max_context_tokens: int = 131072,
        eos_token_ids: tuple[int, ...] = (),
        tokens_per_s: float | None = None,
        faults: Mapping[str, Any] | None = None,
        modalities: Collection[Modality] = (),
        embeddings: int | None = None,
        num_sequences: int | None = None,
        shares_prefixes: bool = True,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._vocab = vocab_size
        self._geometry = Geometry(
            num_layers=1,
            kv_bytes_per_token=8 if embeddings is None else 0,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            description="fake model" if embeddings is None else f"fake embedding model, {embeddings} dimensions",
            num_sequences=num_sequences,
            shares_prefixes=shares_prefixes,
            dimensions=embeddings,
        )
        self.features = self.features | frozenset(modalities)
        if embeddings is not None:
            self.features = frozenset({"embeddings"})
        self.cells: FakeCells | None = None
        self._tokens_per_s = tokens_per_s
        self._faults = dict(faults or {})
        for name in self._faults:
            if name not in FAULTS:
                raise SettingsError(f"backend.fake.faults: unknown fault {name!r} (allowed: {', '.join(FAULTS)})")
        self._sleep = sleep
        self._kv: UInt64s = np.empty(0, dtype=np.uint64)
        self._pool = TokenPool()
        self._cancellation = Cancellation()

    def load(self, progress: Progress | None = None) -> Geometry:
        return self._geometry

    def allocate_kv(self, num_slots: int) -> None:
        geometry = self._geometry
        if geometry.num_sequences is not None:
            self.cells = FakeCells(num_slots, geometry.num_sequences, whole=not geometry.shares_prefixes)
        else:
            self._kv = np.zeros(num_slots, dtype=np.uint64)

    def forward(self, plan: StepPlan) -> StepResult:
        try:
            return self._forward(plan)
        except Exception:
            if self.cells is not None:
                self.cells.skip(plan)
            raise

    def _forward(self, plan: StepPlan) -> StepResult:
        self._cancellation.check(plan.step)
        if self._tokens_per_s:
            self._let_pass(plan.step, plan.num_tokens / self._tokens_per_s)
        self._pool.resolve(plan)
        errors = self._provoked_errors(plan)
        values = kv_values(plan.token_ids, plan.positions, plan.adapter)
        for run in plan.media:
            values[run.first : run.first + run.count] ^= media_values(run)
        errors.update(self._store(plan, values))
        tokens = np.full(plan.num_rows, -1, dtype=np.int32)
        result = StepResult(tokens, errors=errors)
        for sampling in plan.sampling:
            if sampling.row in errors:
                continue
            tokens[sampling.row] = self._sample(plan, sampling)
            if sampling.params.logprobs is not None:
                result.logprobs[sampling.row] = self._logprob(int(tokens[sampling.row]), sampling.params.logprobs)
        for row, wanted in plan.prompt_logprobs.items():
            result.prompt_logprobs[row] = [self._logprob(int(t), wanted.top_k) for t in wanted.targets]
        for row in plan.embeds:
            if row not in errors:
                result.embeddings[row] = embedding(self._history(plan, row), self._geometry.dimensions or 1)
        self._pool.store(plan, tokens)
        return result

    def cancel(self, step: int) -> None:
        self._cancellation.cancel(step)

    def close(self) -> None:
        self._kv = np.empty(0, dtype=np.uint64)

    def _store(self, plan: StepPlan, values: UInt64s) -> dict[int, str]:
        """Errors by row."""
        if self.cells is not None:
            self.cells.do(plan.kv_ops)
            return dict.fromkeys(self.cells.store(plan, values), "the step before was not computed")
        self._kv[plan.slots] = values
        return {}

    def _history(self, plan: StepPlan, row: int) -> UInt64s:
        """uint64 [n], all that a row's tokens have stored."""
        length = int(plan.seq_lens[row])
        if self.cells is not None:
            assert plan.sequences is not None
            return self.cells.values(int(plan.sequences[row]), length)
        return self._kv[plan.page_table[row, :length]]

    def _let_pass(self, step: int, seconds: float) -> None:
        if self._sleep is not None:
            self._sleep(seconds)
        else:
            self._cancellation.sleep(step, seconds)

    def _sample(self, plan: StepPlan, sampling: SamplingRow) -> int:
        history = self._history(plan, sampling.row)
        if sampling.params.greedy:
            return next_token(history, self._vocab, banned=sampling.banned)
        return next_token(history, self._vocab, seed=sampling.seed, index=sampling.output_index, banned=sampling.banned)

    def _logprob(self, token: int, top_k: int) -> TokenLogprobs:
        """Made up, but the same every time: the chosen token is the likeliest, its neighbours follow."""
        ids = tuple((token + i) % self._vocab for i in range(top_k))
        return TokenLogprobs(token, -0.5, ids, tuple(-0.5 - i for i in range(top_k)))

    def _provoked_errors(self, plan: StepPlan) -> dict[int, str]:
        errors: dict[int, str] = {}
        for fault, token in self._faults.items():
            hits = np.flatnonzero(plan.token_ids == token)
            if not len(hits):
                continue
            if fault == "raise_on_token":
                raise RuntimeError(f"fault: token {token} fails the step")
            if fault == "exit_on_token":
                os._exit(9)
            if fault == "hang_on_token":
                (self._sleep or time.sleep)(3600.0)
            if fault == "nan_on_token":
                rows = np.repeat(np.arange(plan.num_rows), plan.extend_lens)[hits]
                errors.update({int(row): "the logits are not finite" for row in rows})
        return errors
