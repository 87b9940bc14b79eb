"""Turns the rows of a step into the arrays of a `StepPlan`."""

from __future__ import annotations

import numpy as np

from weft.core.plan import PromptLogprobsRow, SamplingRow, StepMode, StepPlan
from weft.core.request import Request
from weft.kv.prefix_cache import PrefixCache

Row = tuple[Request, int]
"""A request and how many of its tokens this step computes."""


def build_plan(step: int, mode: StepMode, rows: list[Row], cache: PrefixCache) -> StepPlan:
    """Allocates the slots of all new tokens and copies every fact that the step needs."""
    for request, count in rows:
        cache.extend(request, request.cached_len + count)
    table = cache.rows.table
    table_rows = np.array([request.row for request, _ in rows], dtype=np.int32)
    extend_lens = np.array([count for _, count in rows], dtype=np.int32)
    starts = np.array([request.cached_len for request, _ in rows], dtype=np.int32)
    seq_lens = starts + extend_lens
    # Positions of all new tokens: each row counts up from its start.
    row_of_token = np.repeat(np.arange(len(rows)), extend_lens)
    first_of_row = np.cumsum(extend_lens) - extend_lens
    positions = (np.arange(len(row_of_token)) - first_of_row[row_of_token] + starts[row_of_token]).astype(np.int32)
    token_ids = np.concatenate([r.tokens[r.cached_len : r.cached_len + count] for r, count in rows])
    width = int(seq_lens.max())
    page_table = table[table_rows, :width]  # a copy: what happens to the table later does not reach this step
    page_table[np.arange(width)[None, :] >= seq_lens[:, None]] = 0
    emits = np.array([r.cached_len + count == r.device_len for r, count in rows], dtype=np.bool_)
    return StepPlan(
        step=step,
        mode=mode,
        request_ids=np.array([request.request_id for request, _ in rows], dtype=np.int64),
        table_rows=table_rows,
        extend_lens=extend_lens,
        seq_lens=seq_lens,
        token_ids=token_ids,
        positions=positions,
        slots=table[table_rows[row_of_token], positions],
        page_table=page_table,
        emits=emits,
        sampling=tuple(_sampling_row(i, rows[i][0]) for i in np.flatnonzero(emits).tolist()),
        prompt_logprobs=_prompt_logprobs(rows),
    )


def _sampling_row(index: int, request: Request) -> SamplingRow:
    params = request.params
    return SamplingRow(
        row=index,
        params=params,
        seed=request.seed,
        output_index=request.output_len,
        banned=tuple(sorted(request.end_tokens)) if request.output_len < params.min_tokens else (),
        prompt_ids=request.prompt_ids.copy() if params.has_penalties else None,
        output_ids=request.output_ids.copy() if params.has_penalties else None,
    )


def _prompt_logprobs(rows: list[Row]) -> dict[int, PromptLogprobsRow]:
    wanted: dict[int, PromptLogprobsRow] = {}
    for index, (request, count) in enumerate(rows):
        top_k = request.params.prompt_logprobs
        if top_k is None or request.cached_len >= request.input_len - 1:
            continue
        first = request.cached_len + 1
        last = min(request.cached_len + count + 1, request.input_len)
        wanted[index] = PromptLogprobsRow(top_k, request.prompt_ids[first:last].copy())
    return wanted
