"""A step's plan as tensors, built once per step and read by all layers.

Rows with one new token ("decode") are attended together, padded to the longest of their group. Rows with more
("extend") are attended one by one, in blocks of queries. Layers differ only in their sliding window, so there is one
`AttentionLayout` per distinct window.

Invariant: padding repeats the row's own last slot, never somebody else's, so that a row with NaN in its cache cannot
reach another row through masked positions (0 · NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.plan import Int32s, Int64s, StepPlan

QUERY_BLOCK = 256
"""Queries attended at once. A block's keys end with its last query, which halves the work above the diagonal."""

LONE_SPAN_TOKENS = 256
"""A decode row of so many neighbouring slots is read in place, alone, instead of copied into its group."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where to read keys and values: `count` slots, neighbouring from `first` on, or those of `table` (int64)."""

    count: int
    first: int
    table: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one new token each.

    Attributes:
        tokens: int64 [n], their tokens in the step; None if they are the whole step, in order.
        keys: n * length slots, row after row.
        mask: [n, 1, 1, length], added to the scores (0 or -inf); None if nothing is padded.
    """

    tokens: torch.Tensor | None
    rows: int
    length: int
    keys: Keys
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries `start` to `stop` of the step's tokens, over keys `keys_from` to `keys_to` of their row's `Keys`."""

    start: int
    stop: int
    keys_from: int
    keys_to: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A row with several new tokens, `start` to `stop`; `keys` is None if all it reads is new in this step."""

    start: int
    stop: int
    keys: Keys | None
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """What the layers of one window attend to in this step."""

    decode: tuple[DecodeGroup, ...]
    extend: tuple[ExtendRow, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A plan on the device. token_ids, positions, slots: int64 [T]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layouts: dict[int | None, AttentionLayout]
    plan: StepPlan


class MaskBank:
    """Causal masks, all of them views of one matrix per window that grows and is kept between steps.

    Whether query i of a block sees a key depends only on i and on the key's distance from the block's first query. So
    one matrix over all distances serves every block of every row: rows are queries, columns distances.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._matrices: dict[int | None, torch.Tensor] = {}

    def block(self, window: int | None, before: int, queries: int) -> torch.Tensor:
        """Mask [queries, before + queries]: `before` keys precede the block's first query."""
        matrix = self._matrices.get(window)
        reach = 0 if matrix is None else matrix.shape[1] - QUERY_BLOCK
        if matrix is None or before > reach:
            reach = max(1024, 2 ** (before - 1).bit_length() if before > 1 else 1)
            matrix = self._matrices[window] = self._build(window, reach)
        return matrix[:queries, reach - before : reach + queries]

    def _build(self, window: int | None, reach: int) -> torch.Tensor:
        queries = torch.arange(QUERY_BLOCK, device=self._device)[:, None]
        distances = torch.arange(-reach, QUERY_BLOCK, device=self._device)[None, :]
        hidden = distances > queries
        if window is not None:
            hidden |= distances <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))


class BatchBuilder:
    """Turns plans into batches for one model on one device."""

    def __init__(self, windows: Iterable[int | None], dtype: torch.dtype, device: torch.device) -> None:
        self._windows = tuple(dict.fromkeys(windows))
        self._dtype, self._device = dtype, device
        self._masks = MaskBank(dtype, device)

    def build(self, plan: StepPlan) -> StepBatch:
        return StepBatch(
            token_ids=self._to_device(plan.token_ids),
            positions=self._to_device(plan.positions),
            slots=self._to_device(plan.slots),
            layouts={window: self._layout(plan, window) for window in self._windows},
            plan=plan,
        )

    def _to_device(self, values: Int32s | Int64s) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _layout(self, plan: StepPlan, window: int | None) -> AttentionLayout:
        starts = np.cumsum(plan.extend_lens) - plan.extend_lens
        decoding = np.flatnonzero(plan.extend_lens == 1)
        extending = np.flatnonzero(plan.extend_lens > 1)
        return AttentionLayout(
            decode=tuple(self._decode_groups(plan, decoding, starts, window)),
            extend=tuple(self._extend_row(plan, int(row), int(starts[row]), window) for row in extending),
        )

    def _decode_groups(self, plan: StepPlan, rows: Int64s, starts: Int64s, window: int | None) -> Iterable[DecodeGroup]:
        if rows.size == 0:
            return
        ends = plan.seq_lens[rows].astype(np.int64)
        lengths = ends if window is None else np.minimum(ends, window)
        together = np.ones(rows.size, bool)
        for index in np.flatnonzero(lengths >= LONE_SPAN_TOKENS) if rows.size > 1 else ():
            slots = plan.page_table[rows[index], ends[index] - lengths[index] : ends[index]]
            together[index] = not _is_span(slots)
        for index in np.flatnonzero(~together):
            yield self._decode_group(plan, rows[[index]], starts, ends[[index]], lengths[[index]])
        for members in group_by_length(np.flatnonzero(together), lengths):
            yield self._decode_group(plan, rows[members], starts, ends[members], lengths[members])

    def _decode_group(self, plan: StepPlan, rows: Int64s, starts: Int64s, ends: Int64s, lengths: Int64s) -> DecodeGroup:
        longest = int(lengths.max())
        offsets = np.minimum(np.arange(longest), lengths[:, None] - 1)  # beyond the end: the row's own last slot
        slots = plan.page_table[rows[:, None], (ends - lengths)[:, None] + offsets]
        mask = None
        if int(lengths.min()) < longest:
            hidden = torch.from_numpy(np.arange(longest) >= lengths[:, None]).to(self._device)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        whole = rows.size == plan.num_tokens  # then no row extends and no other group exists
        tokens = None if whole else self._to_device(starts[rows])
        return DecodeGroup(tokens, int(rows.size), longest, self._keys(slots.reshape(-1)), mask)

    def _extend_row(self, plan: StepPlan, row: int, start: int, window: int | None) -> ExtendRow:
        count, end = int(plan.extend_lens[row]), int(plan.seq_lens[row])
        prefix = end - count
        base = 0 if window is None else max(0, prefix + 1 - window)
        blocks = []
        for offset in range(0, count, QUERY_BLOCK):
            queries = min(QUERY_BLOCK, count - offset)
            first = prefix + offset
            before = first if window is None else min(first, window - 1)
            blocks.append(
                QueryBlock(
                    start=start + offset,
                    stop=start + offset + queries,
                    keys_from=first - before - base,
                    keys_to=first + queries - base,
                    mask=self._masks.block(window, before, queries),
                )
            )
        keys = self._keys(plan.page_table[row, base:end]) if prefix else None
        return ExtendRow(start, start + count, keys, tuple(blocks))

    def _keys(self, slots: Int32s) -> Keys:
        if _is_span(slots):
            return Keys(len(slots), int(slots[0]), None)
        return Keys(len(slots), 0, self._to_device(slots))


def _is_span(slots: Int32s) -> bool:
    """Whether the slots are neighbours in ascending order."""
    return int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((np.diff(slots) == 1).all())


def group_by_length(members: Int64s, lengths: Int64s) -> list[Int64s]:
    """Splits rows so that padding to a group's longest wastes at most half of it; one group wherever that holds.

    members: indices into lengths. Groups keep the members' order if there is only one.
    """
    if members.size == 0:
        return []
    if lengths[members].max() * members.size <= 2 * lengths[members].sum():
        return [members]
    groups = []
    ordered = members[np.argsort(-lengths[members], kind="stable")]
    while ordered.size:
        fits = 2 * lengths[ordered] >= lengths[ordered[0]]  # descending, so these come first
        groups.append(ordered[fits])
        ordered = ordered[~fits]
    return groups
