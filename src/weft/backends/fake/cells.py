"""KV under sequence ids, as llama.cpp's unified cache keeps it: cells that carry a position and a set of ids.

Strict where llama.cpp is not: a hole, an overwritten cell, a copy of nothing and a cache that is full raise, since each
of them would be the scheduler's mistake.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core.plan import PIECE_TOKENS, TO_THE_END, Int32s, KvOp, StepPlan, UInt64s


class FakeCells:
    """`num_cells` cells, `total` sequences. A value (uint64) stands for a token's K and V.

    `whole`: a sequence has one state, which cannot be cut or copied, and is lost with a step that is not computed.
    """

    def __init__(self, num_cells: int, total: int, *, whole: bool = False) -> None:
        self._whole = whole
        self._values: UInt64s = np.zeros(num_cells, dtype=np.uint64)
        self._cell_of: list[dict[int, int]] = [{} for _ in range(total)]  # of each sequence: position -> cell
        self._owners = np.zeros(num_cells, dtype=np.int32)
        self.pieces: dict[int, tuple[int, UInt64s]] = {}  # in host memory: where they start, and their values
        self._lost: dict[int, None] = {}  # sequences with a step that was not computed

    @property
    def used(self) -> int:
        """Cells that some sequence owns."""
        return int(np.count_nonzero(self._owners))

    def length(self, sequence: int) -> int:
        """Tokens that a sequence covers; they start at 0 without a hole."""
        cells = self._cell_of[sequence]
        if cells and max(cells) != len(cells) - 1:
            raise RuntimeError(f"sequence {sequence} has a hole: {len(cells)} cells up to position {max(cells)}")
        return len(cells)

    def do(self, ops: tuple[KvOp, ...]) -> None:
        for op in ops:
            if op.kind == "remove":
                self._remove(op.sequence, op.start, op.end)
            elif op.kind == "copy":
                self._copy(op.source, op.sequence, op.start, op.end)
            elif op.kind == "save":
                if op.piece in self.pieces:
                    raise RuntimeError(f"piece {op.piece} is there already")
                self.pieces[op.piece] = (op.start, self.values(op.sequence, op.end)[op.start :])
            elif op.kind == "load":
                self._load(op)
            else:
                del self.pieces[op.piece]

    def skip(self, plan: StepPlan) -> None:
        """A step is not computed; what was planned on top of it for the same sequences cannot be either."""
        self.do(plan.kv_ops)
        assert plan.sequences is not None
        self._lost.update(dict.fromkeys(plan.sequences.tolist()))

    def store(self, plan: StepPlan, values: UInt64s) -> list[int]:
        """New cells for all tokens of a step, each at the end of its row's sequence; returns the rows that could not be
        computed, since a step before was not."""
        assert plan.sequences is not None
        free = self._free()
        first, lost = 0, []
        for row, (sequence, count) in enumerate(zip(plan.sequences.tolist(), plan.extend_lens.tolist(), strict=True)):
            start = int(plan.seq_lens[row]) - count
            if self.length(sequence) == start and not (self._whole and sequence in self._lost):
                self._append(sequence, values[first : first + count], free)
            elif sequence in self._lost:
                lost.append(row)
            else:
                raise RuntimeError(f"sequence {sequence} covers {self.length(sequence)} tokens, the plan says {start}")
            first += count
        return lost

    def values(self, sequence: int, length: int) -> UInt64s:
        """uint64 [length], what the sequence stores at positions 0 to length - 1."""
        cells: Int32s = np.array([self._cell_of[sequence][i] for i in range(length)], dtype=np.int32)
        return self._values[cells]

    def _free(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._owners == 0).tolist())

    def _append(self, sequence: int, values: UInt64s, free: Iterator[int]) -> None:
        """New cells at the end of a sequence."""
        for position, value in enumerate(values, len(self._cell_of[sequence])):
            cell = next(free, None)
            if cell is None:
                raise RuntimeError("no free cell")
            self._values[cell] = value
            self._owners[cell] = 1
            self._cell_of[sequence][position] = cell

    def _load(self, op: KvOp) -> None:
        if self.length(op.sequence) != op.start:
            raise RuntimeError(
                f"load at {op.start} of sequence {op.sequence}, which ends at {self.length(op.sequence)}"
            )
        first, values = self.pieces[op.piece]
        if len(values) > np.count_nonzero(self._owners == 0) + PIECE_TOKENS:
            raise RuntimeError("no room for a piece")
        part = values[op.start - first : op.end - first]
        if op.start < first or len(part) != op.end - op.start:
            raise RuntimeError(f"piece {op.piece} of {len(values)} tokens from {first} has no [{op.start}, {op.end})")
        self._append(op.sequence, part, self._free())

    def _copy(self, source: int, sequence: int, start: int, end: int) -> None:
        if self._whole:
            raise RuntimeError(f"sequence {sequence} gets a copy of a part of sequence {source}")
        for position in range(start, end):
            if position in self._cell_of[sequence]:
                raise RuntimeError(f"copy over position {position} of sequence {sequence}")
            cell = self._cell_of[source][position]
            self._cell_of[sequence][position] = cell
            self._owners[cell] += 1

    def _remove(self, sequence: int, start: int, end: int) -> None:
        cells = self._cell_of[sequence]
        if self._whole and (start or end != TO_THE_END):
            raise RuntimeError(f"sequence {sequence} is cut")
        if end == TO_THE_END:  # otherwise a copy fills the gap, and what is missing beyond it still is
            self._lost.pop(sequence, None)
        for position in [p for p in cells if p >= start and (end == TO_THE_END or p < end)]:
            self._owners[cells.pop(position)] -= 1
