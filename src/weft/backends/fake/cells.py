"""KV under sequence ids, as llama.cpp's unified cache keeps it: cells that carry a position and a set of ids.

Strict where llama.cpp is not: a hole, an overwritten cell, a copy of nothing and a cache that is full raise, since each
of them would be the scheduler's mistake.
"""

from __future__ import annotations

import numpy as np

from weft.core.plan import TO_THE_END, Int32s, KvOp, StepPlan, UInt64s


class FakeCells:
    """`num_cells` cells, `total` sequences. A value (uint64) stands for a token's K and V."""

    def __init__(self, num_cells: int, total: int) -> None:
        self._values: UInt64s = np.zeros(num_cells, dtype=np.uint64)
        self._cell_of: list[dict[int, int]] = [{} for _ in range(total)]  # of each sequence: position -> cell
        self._owners = np.zeros(num_cells, dtype=np.int32)
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
            else:
                self._copy(op.source, op.sequence, op.start, op.end)

    def skip(self, plan: StepPlan) -> None:
        """A step is not computed; what was planned on top of it for the same sequences cannot be either."""
        self.do(plan.kv_ops)
        assert plan.sequences is not None
        self._lost.update(dict.fromkeys(plan.sequences.tolist()))

    def store(self, plan: StepPlan, values: UInt64s) -> list[int]:
        """New cells for all tokens of a step, each at the end of its row's sequence; returns the rows that could not be
        computed, since a step before was not."""
        assert plan.sequences is not None
        free = iter(np.flatnonzero(self._owners == 0).tolist())
        first, lost = 0, []
        for row, (sequence, count) in enumerate(zip(plan.sequences.tolist(), plan.extend_lens.tolist(), strict=True)):
            start = int(plan.seq_lens[row]) - count
            if self.length(sequence) == start:
                for position, value in enumerate(values[first : first + count], start):
                    cell = next(free, None)
                    if cell is None:
                        raise RuntimeError("no free cell")
                    self._values[cell] = value
                    self._owners[cell] = 1
                    self._cell_of[sequence][position] = cell
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

    def _copy(self, source: int, sequence: int, start: int, end: int) -> None:
        for position in range(start, end):
            if position in self._cell_of[sequence]:
                raise RuntimeError(f"copy over position {position} of sequence {sequence}")
            cell = self._cell_of[source][position]
            self._cell_of[sequence][position] = cell
            self._owners[cell] += 1

    def _remove(self, sequence: int, start: int, end: int) -> None:
        cells = self._cell_of[sequence]
        if end == TO_THE_END:  # otherwise a copy fills the gap, and what is missing beyond it still is
            self._lost.pop(sequence, None)
        for position in [p for p in cells if p >= start and (end == TO_THE_END or p < end)]:
            self._owners[cells.pop(position)] -= 1
