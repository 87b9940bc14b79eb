"""What the scheduler asks of a backend for one step, and what comes back.

A plan is a set of facts: it copies what it needs from live state, so that nothing that happens to a request while its
step is in flight can change what the step computes or how its result is read.

Shapes: R rows (one per request in this step), T new tokens over all rows, E emitting rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from weft.core.media import Medium
from weft.core.sampling import SamplingParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

StepMode = Literal["extend", "decode", "mixed"]

IN_FLIGHT = -1
"""Stands for a token that a step in flight will sample; only the backend knows it when it computes the next step."""


@dataclass(slots=True)  # not frozen: that would triple the cost of making one, and a step has hundreds
class SamplingRow:
    """How one emitting row chooses its token.

    Attributes:
        row: index into the plan's rows.
        params: the request's parameters.
        seed: the request's own 64-bit seed, always set.
        output_index: 0 for the first generated token; with `seed` it fixes the draw.
        banned: token ids that cannot be chosen now (end tokens before `min_tokens`).
        prompt_ids, output_ids: tokens so far, filled only where penalties need them (int32); a last output token of
            `IN_FLIGHT` is the one that the step before this samples.
    """

    row: int
    params: SamplingParams
    seed: int
    output_index: int
    banned: tuple[int, ...] = ()
    prompt_ids: Int32s | None = None
    output_ids: Int32s | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsRow:
    """Wanted log probabilities of prompt tokens in one row.

    Attributes:
        top_k: how many of the likeliest tokens go with each.
        targets: int32 [m], the prompt tokens that follow the row's first m new tokens (m is the row's `extend_lens`, or
            one less in the chunk that ends the prompt).
    """

    top_k: int
    targets: Int32s


TO_THE_END = -1
PIECE_TOKENS = 256
"""Longest run of cells that goes to host memory at once. An engine has so many spare cells to take a part back."""


@dataclass(frozen=True, slots=True)
class KvOp:
    """What an engine that stores KV under sequence ids has to do to its cells before the step that brings it.

    copy: the cells of `source` at positions [start, end) become cells of `sequence` too; nothing is computed or moved.
    remove: the cells of `sequence` at positions [start, end) stop being its own; `end` may be `TO_THE_END`. A cell that
    no sequence owns is free.
    save: what those cells hold is kept in host memory too, as `piece`.
    load: the cells [start, end) of `piece` come back as new cells of `sequence`, which ends at `start`.
    drop: `piece` is not needed any more.
    """

    kind: Literal["copy", "remove", "save", "load", "drop"]
    sequence: int
    start: int
    end: int
    source: int = -1
    piece: int = -1


@dataclass(frozen=True, slots=True)
class MediaRun:
    """New tokens of a step that stand for a medium, or for a part of it.

    Attributes:
        first, count: the step's tokens [first, first + count).
        start: which of the medium's own tokens the first of them is; `total`: how many it has.
    """

    first: int
    count: int
    start: int
    total: int
    medium: Medium


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine.

    Attributes:
        step: number of the step, from 0.
        mode: "extend" (prompt tokens), "decode" (one token a row) or "mixed".
        request_ids: int64 [R].
        table_rows: int32 [R], each request's row in the `ReqToTokenPool`.
        extend_lens: int32 [R], new tokens of each row (1 in decode).
        seq_lens: int32 [R], tokens of each row after this step; the row's new tokens are its last `extend_lens`.
        token_ids, positions, slots: int32 [T], rows one after another; `slots` is where each token's K and V go. A
            token id of `IN_FLIGHT` is the one that the step before this samples for the same table row.
        page_table: int32 [R, max(seq_lens)], slot of every position, this step's included; what is beyond a row's
            means nothing.
        emits: bool [R], whether the row's last token yields a new one (false for all but the last prompt chunk).
        sampling: one entry per emitting row, in row order.
        prompt_logprobs: row -> which of its prompt tokens' log probabilities are wanted.
        embeds: rows whose vector is wanted: their whole prompt is in this step, and they emit nothing.
        sequences: int32 [R], the sequence of each row, for engines that store KV under sequence ids; else None.
        kv_ops: for the same engines, to be done in this order before anything is computed.
        adapter: the LoRA adapter of all rows, 0 for none.
        media: which of `token_ids` stand for images and sounds; what their ids are means nothing.
    """

    step: int
    mode: StepMode
    request_ids: Int64s
    table_rows: Int32s
    extend_lens: Int32s
    seq_lens: Int32s
    token_ids: Int32s
    positions: Int32s
    slots: Int32s
    page_table: Int32s
    emits: Bools
    sampling: tuple[SamplingRow, ...]
    prompt_logprobs: dict[int, PromptLogprobsRow] = field(default_factory=dict)
    embeds: tuple[int, ...] = ()
    sequences: Int32s | None = None
    kv_ops: tuple[KvOp, ...] = ()
    adapter: int = 0
    media: tuple[MediaRun, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token and of the k likeliest ones, best first (natural logarithm)."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        tokens: int32 [R], the chosen token of each emitting row, -1 elsewhere.
        logprobs: row -> log probabilities of its chosen token, where asked for.
        prompt_logprobs: row -> one entry per target of the plan's `PromptLogprobsRow`.
        errors: row -> message, for rows that failed alone (say, NaN logits); their request ends, the others go on.
        embeddings: row -> float32 [dimensions] of length 1, for the rows of the plan's `embeds` that did not fail.
    """

    tokens: Int32s
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    embeddings: dict[int, Float32s] = field(default_factory=dict)
