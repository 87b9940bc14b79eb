"""The fake engine's model, whole steps at a time: the same tokens as `FakeBackend`, fast enough for millions of steps.

The "KV" of a token is a number made of token, position and adapter, and the next token is a hash of all of them. A row
reads every slot of its page table, so one wrong, stale or missing slot anywhere changes its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.backends.fake.cells import FakeCells
from weft.backends.steps import TokenPool
from weft.core.plan import Int32s, Int64s, StepPlan, StepResult, UInt64s

_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = tuple((np.uint64(s), np.uint64(f)) for s, f in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
_LAST, _HALF, _ADAPTER = np.uint64(31), np.uint64(32), np.uint64(24)


def mix(values: UInt64s) -> UInt64s:
    """As the fake backend's, splitmix64's finisher; `values` is overwritten."""
    values *= _GOLDEN
    values += _GOLDEN
    for shift, factor in _STEPS:
        values ^= values >> shift
        values *= factor
    values ^= values >> _LAST
    return values


def kv_values(tokens: Int32s | Int64s, positions: Int32s | Int64s, adapters: int | Int64s = 0) -> UInt64s:
    """uint64 [T], as the fake backend's: what is stored for each token at its position, with this adapter."""
    places = positions.astype(np.uint64) | (np.asarray(adapters, dtype=np.uint64) << _ADAPTER)
    return mix((places << _HALF) | tokens.astype(np.uint64))


def choose(
    totals: UInt64s, seeds: UInt64s, indices: Int64s, vocab: int, banned: Mapping[int, tuple[int, ...]] | None = None
) -> Int64s:
    """int64 [R], the tokens that follow R sequences.

    Args:
        totals: sum of `kv_values` over each sequence. seeds, indices: 0 for greedy rows. banned: row -> tokens.
    """
    salts = mix(np.concatenate([seeds, indices.astype(np.uint64)]))
    rows = len(totals)
    states = mix(totals ^ salts[:rows] ^ (salts[rows:] >> _ONE))
    tokens = (states % np.uint64(vocab)).astype(np.int64)
    for row, tokens_banned in (banned or {}).items():
        while int(tokens[row]) in tokens_banned:
            mix(states[row : row + 1])
            tokens[row] = int(states[row] % np.uint64(vocab))
    return tokens


def total_of(tokens: Int32s, adapter: int = 0) -> np.uint64:
    """The sum that `choose` takes, of one sequence."""
    values = kv_values(tokens, np.arange(len(tokens), dtype=np.int32), adapter)
    total: np.uint64 = np.add.reduce(values, dtype=np.uint64)
    return total


class HashModel:
    """Computes plans over a pool of `num_slots`, or over the fake engine's cells where there are sequences."""

    def __init__(self, vocab: int, num_slots: int, num_sequences: int | None = None, *, shares: bool = True) -> None:
        self._vocab = vocab
        self.cells = FakeCells(num_slots, num_sequences, whole=not shares) if num_sequences is not None else None
        self._kv = np.zeros(num_slots + 1, dtype=np.uint64)  # the last one stays zero: what is beyond a row's end
        self._nothing = num_slots
        self._pool = TokenPool()

    def forward(self, plan: StepPlan) -> StepResult:
        """Tokens of one step; steps come in the order of their plans."""
        self._pool.resolve(plan)
        values = kv_values(plan.token_ids, plan.positions, plan.adapter)
        result = StepResult(np.full(plan.num_rows, -1, dtype=np.int32))
        if self.cells is not None:
            self.cells.do(plan.kv_ops)
            result.errors.update(dict.fromkeys(self.cells.store(plan, values), "the step before was not computed"))
        else:
            self._kv[plan.slots] = values
        rows = np.array([s.row for s in plan.sampling if s.row not in result.errors], dtype=np.int64)
        if len(rows):
            result.tokens[rows] = self._sample(plan, rows)
        self._pool.store(plan, result.tokens)
        return result

    def skip(self, plan: StepPlan) -> None:
        """A step is not computed; what it says about sequences is done."""
        if self.cells is not None:
            self.cells.skip(plan)

    def _sample(self, plan: StepPlan, rows: Int64s) -> Int64s:
        totals = self._totals(plan, rows)
        taken = set(rows.tolist())
        sampling = [s for s in plan.sampling if s.row in taken]
        seeds = np.array([0 if s.params.temperature == 0.0 else s.seed for s in sampling], dtype=np.uint64)
        indices = np.array([0 if s.params.temperature == 0.0 else s.output_index for s in sampling])
        banned = {i: s.banned for i, s in enumerate(sampling) if s.banned}
        return choose(totals, seeds, indices, self._vocab, banned)

    def _totals(self, plan: StepPlan, rows: Int64s) -> UInt64s:
        """uint64 [rows], sum of all that each of them has stored."""
        if self.cells is not None:
            assert plan.sequences is not None
            owners = zip(plan.sequences[rows].tolist(), plan.seq_lens[rows].tolist(), strict=True)
            return np.array([np.add.reduce(self.cells.values(*owner), dtype=np.uint64) for owner in owners])
        table, lens = plan.page_table, plan.seq_lens
        if len(rows) < plan.num_rows:
            table, lens = table[rows], lens[rows]
        within = np.arange(table.shape[1], dtype=np.int32)[None, :] < lens[:, None]
        totals: UInt64s = np.add.reduce(self._kv[np.where(within, table, self._nothing)], axis=1, dtype=np.uint64)
        return totals
