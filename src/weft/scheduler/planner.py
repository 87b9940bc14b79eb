"""Turns the rows of a step into the arrays of a `StepPlan`."""

from __future__ import annotations

import numpy as np

from weft.core.plan import IN_FLIGHT, Int32s, Int64s, MediaRun, PromptLogprobsRow, SamplingRow, StepMode, StepPlan
from weft.core.request import Request
from weft.kv.prefix_cache import PrefixCache

Row = tuple[Request, int]
"""A request and how many of its tokens this step computes."""


def build_plan(
    step: int, mode: StepMode, prompts: list[Row], decoding: list[Request], cache: PrefixCache, now_s: float
) -> StepPlan:
    """Allocates the slots of all new tokens and copies every fact that the step needs; the requests depart.

    Rows are those of `prompts`, then `decoding` with one token each; all of them have one adapter.
    """
    emits: list[bool] = []
    sampling: list[SamplingRow] = []
    pieces: list[Int32s] = []
    wanted: dict[int, PromptLogprobsRow] = {}
    embeds: list[int] = []
    media: list[MediaRun] = []
    num_tokens = 0
    starts = [request.planned_len for request, _ in prompts] + [request.planned_len for request in decoding]
    for index, (request, count) in enumerate(prompts):
        start = request.planned_len
        cache.extend(request, start + count, now_s)
        pieces.append(request.tokens[start : start + count])
        media += _media_runs(request, start, count, num_tokens)
        num_tokens += count
        if request.params.embed:
            embeds.append(index)
        emitting = start + count == request.device_len and not request.params.embed
        emits.append(emitting)
        if emitting:
            sampling.append(_sampling_row(index, request))
        if request.params.prompt_logprobs is not None and request.prompt_logprobs_len < request.input_len:
            _want_prompt_logprobs(wanted, index, request, count)
        request.depart(count, emits=emitting)
    cache.extend_by_one(decoding, now_s)
    last_tokens: list[int] = []
    for index, request in enumerate(decoding, start=len(prompts)):
        last_tokens.append(IN_FLIGHT if request.tokens_in_flight else request.last_token)
        sampling.append(_sampling_row(index, request))
        request.depart(1, emits=True)
    pieces.append(np.array(last_tokens, dtype=np.int32))
    emits += [True] * len(decoding)
    requests = [request for request, _ in prompts] + decoding
    table_rows = np.array([request.row for request in requests], dtype=np.int32)
    extend_lens = np.array([count for _, count in prompts] + [1] * len(decoding), dtype=np.int32)
    first = np.array(starts, dtype=np.int32)
    seq_lens = first + extend_lens
    row_of_token, positions = _places(first, extend_lens) if prompts else (slice(None), first)
    table, width = cache.rows.table, int(seq_lens.max())
    page_table = table[table_rows, :width]  # a copy: what happens to the table later does not reach this step
    return StepPlan(
        step=step,
        mode=mode,
        request_ids=np.array([request.request_id for request in requests], dtype=np.int64),
        table_rows=table_rows,
        extend_lens=extend_lens,
        seq_lens=seq_lens,
        token_ids=np.concatenate(pieces),
        positions=positions,
        slots=table[table_rows[row_of_token], positions],
        page_table=page_table,
        emits=np.array(emits, dtype=np.bool_),
        sampling=tuple(sampling),
        prompt_logprobs=wanted,
        embeds=tuple(embeds),
        sequences=cache.sequences_of(requests),
        kv_ops=cache.take_ops(),
        adapter=requests[0].adapter,
        media=tuple(media),
    )


def _media_runs(request: Request, start: int, count: int, at: int) -> list[MediaRun]:
    """Which of the request's tokens [start, start + count), the step's from `at` on, stand for media."""
    runs: list[MediaRun] = []
    for span in request.media:
        first, last = max(start, span.start), min(start + count, span.end)
        if first < last:
            place = at + first - start
            runs.append(MediaRun(place, last - first, first - span.start, len(span.keys), span.medium))
    return runs


def _places(first: Int32s, extend_lens: Int32s) -> tuple[Int64s, Int32s]:
    """Row and position of every new token: each row counts up from its start."""
    row_of_token = np.repeat(np.arange(len(first)), extend_lens)
    first_of_row = np.cumsum(extend_lens) - extend_lens
    positions = np.arange(len(row_of_token)) - (first_of_row - first)[row_of_token]
    return row_of_token, positions.astype(np.int32)


_IN_FLIGHT: Int32s = np.array([IN_FLIGHT], dtype=np.int32)


def _sampling_row(index: int, request: Request) -> SamplingRow:
    params = request.params
    output_index = request.expected_len - request.input_len
    banned = tuple(sorted(request.end_tokens)) if output_index < params.min_tokens else ()
    if not params.has_penalties:
        return SamplingRow(index, params, request.seed, output_index, banned)
    output = request.output_ids
    if request.tokens_in_flight:
        output = np.append(output, _IN_FLIGHT)
    return SamplingRow(index, params, request.seed, output_index, banned, request.prompt_ids.copy(), output.copy())


def _want_prompt_logprobs(wanted: dict[int, PromptLogprobsRow], index: int, request: Request, count: int) -> None:
    first = request.planned_len + 1
    last = min(request.planned_len + count + 1, request.input_len)
    top_k = request.params.prompt_logprobs
    if first < last and top_k is not None:
        wanted[index] = PromptLogprobsRow(top_k, request.prompt_ids[first:last].copy())
