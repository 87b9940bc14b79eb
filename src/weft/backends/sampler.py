"""Chooses tokens from logits on the host, with numpy alone.

For engines whose logits lie in the host's memory. The rules and their order are those of core/sampling.py and of the
sampler on tensors: logit bias, banned tokens, penalties, then the likeliest token (temperature 0) or temperature,
min-p, top-k, top-p and a draw. Log probabilities are of the logits as the model gave them.

What fixes a choice, so that equal requests give equal text whatever else is in the batch:
- Every row is worked on alone.
- Ties go to the lowest token id; tokens tied at a top-k or top-p border are all kept.
- A draw takes one number u per row from `draw.uniform(seed, output_index)` and picks the first token, in order of token
  id, at which the running sum of probabilities passes u.

What keeps it fast: a row is looked through as few times as its rules allow, one row after another, so that a row stays
in the processor's cache meanwhile. Top-k and min-p are decided on logits, and only what they leave is exponentiated.
Weights are float32, their sums float64.

Sources: nucleus sampling (Holtzman et al., arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082), repetition
penalty (Keskar et al., arXiv:1909.05858), presence and frequency penalties as in OpenAI's API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.backends.draw import uniform
from weft.core.plan import Float32s, Int32s, Int64s, SamplingRow, TokenLogprobs
from weft.core.sampling import SamplingParams

Ids = npt.NDArray[np.intp]

STRIPES = 2048
"""The largest logit of each of so many stripes (every 2048th token) bounds the k-th largest of all from below."""

NUCLEUS_PARTS = 1024
"""Top-p sorts only tokens that weigh at least this part of what may be left out; if they fall short, smaller parts."""

DRAW_BLOCK = 1024
"""Weights are summed in blocks of so many; only the block that holds the draw is summed token by token."""

LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""A lower temperature would be 0 in float32; at this one all but the likeliest tokens already have weight 0."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Chosen tokens, int32 [E] (-1 for failed rows); log probabilities and errors by index into the rows."""

    tokens: Int32s
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


class _NoChoiceError(Exception):
    """One row has no token to choose; the message says why."""


def choose(logits: Float32s, rows: Sequence[SamplingRow]) -> Choices:
    """logits float32 [E, vocabulary], only read; one `SamplingRow` each. Raises ValueError if their numbers differ."""
    tokens = np.full(len(rows), -1, np.int32)
    logprobs: dict[int, TokenLogprobs] = {}
    errors: dict[int, str] = {}
    # Differences to the best logit may pass the range of float32, and weights may vanish: both give 0, as they should.
    with np.errstate(all="ignore"):
        for index, (values, row) in enumerate(zip(logits, rows, strict=True)):
            try:
                token = _choose_one(values, row)
            except _NoChoiceError as error:
                errors[index] = str(error)
                continue
            tokens[index] = token
            if row.params.logprobs is not None:
                logprobs[index] = _describe_one(values, _log_sum(values), token, row.params.logprobs)
    return Choices(tokens, logprobs, errors)


def log_softmax(logits: Float32s) -> Float32s:
    """Natural logarithms of probabilities, float32 [n, vocabulary]; NaN throughout a row without a finite maximum."""
    scores = np.empty(logits.shape, np.float32)
    with np.errstate(all="ignore"):
        for values, out in zip(logits, scores, strict=True):
            np.subtract(values, _log_sum(values), out=out, dtype=np.float64, casting="same_kind")
    return scores


def describe(scores: Float32s, targets: Int64s, counts: Sequence[int]) -> list[TokenLogprobs]:
    """scores float32 [n, vocabulary], targets int64 [n], how many of the best each wants -> one entry per row."""
    columns = zip(scores, targets.tolist(), counts, strict=True)
    return [_describe_one(values, 0.0, target, count) for values, target, count in columns]


def _describe_one(values: Float32s, log_sum: float, token: int, count: int) -> TokenLogprobs:
    """One row's entry; `log_sum` is what makes log probabilities of its values."""
    logprob = float(values[token]) - log_sum
    count = min(count, len(values))
    if count == 0:
        return TokenLogprobs(token, logprob)
    ids = _likeliest(values, count, _stripe_maxima(values))
    ids = ids[np.argsort(-values[ids], kind="stable")[:count]]  # the ids ascend, so the lowest goes first among equals
    best = values[ids].astype(np.float64) - log_sum
    return TokenLogprobs(token, logprob, tuple(ids.tolist()), tuple(best.tolist()))


def _log_sum(values: Float32s) -> float:
    """log(sum(exp(values))), NaN if the largest is not finite."""
    best = values.max()
    return float(best) + math.log(_weights(values, best, 1.0).sum(dtype=np.float64))


def _choose_one(values: Float32s, row: SamplingRow) -> int:
    """values float32 [vocabulary], only read. Raises _NoChoiceError."""
    params = row.params
    changes = bool(params.logit_bias or row.banned or params.has_penalties)
    if changes:
        _check_best(float(values.max()), changed=False)
        values = _process(values, row)
    # A maximum is NaN if there is one, and `argmax` is then its place: one look finds the best and what is not finite.
    if params.greedy:
        token = int(values.argmax())
        _check_best(float(values[token]), changes)
        return token
    maxima = _stripe_maxima(values)
    best = maxima.max()
    _check_best(float(best), changes)
    return _draw(values, best, maxima, row)


def _check_best(best: float, changed: bool) -> None:
    """Raises _NoChoiceError unless a row's largest logit is finite; `changed`: by bias, bans or penalties."""
    if math.isfinite(best):
        return
    if not changed:
        raise _NoChoiceError("the model returned no finite logits for this request")
    if best == -math.inf:
        raise _NoChoiceError("bias and banned tokens leave no token to choose")
    raise _NoChoiceError("the penalties of this request take its logits out of range")


def _process(values: Float32s, row: SamplingRow) -> Float32s:
    """A copy with bias, bans and penalties: repetition over prompt and output, the others over the output alone."""
    params, values = row.params, values.copy()
    if params.logit_bias:
        values[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if row.banned:
        values[list(row.banned)] = -math.inf
    if not params.has_penalties:
        return values
    empty = np.empty(0, np.int32)
    prompt = empty if row.prompt_ids is None else row.prompt_ids
    output = empty if row.output_ids is None else row.output_ids
    if params.repetition_penalty != 1.0:
        ids = np.unique(np.concatenate((prompt, output)))
        penalty, some = np.float32(params.repetition_penalty), values[ids]
        values[ids] = np.where(some > 0, some / penalty, some * penalty)
    ids, counts = np.unique(output, return_counts=True)
    values[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return values


def _draw(values: Float32s, best: np.float32, maxima: Float32s, row: SamplingRow) -> int:
    """Temperature, min-p, top-k, top-p, then one draw -> token id."""
    params = row.params
    ids = _cut(values, best, maxima, params)
    weights = _weights(values if ids is None else values[ids], best, params.temperature)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        weights = weights[nucleus]
        ids = nucleus if ids is None else ids[nucleus]
    place = _inverse_cdf(weights, uniform(row.seed, row.output_index))
    return place if ids is None else int(ids[place])


def _cut(values: Float32s, best: np.float32, maxima: Float32s, params: SamplingParams) -> Ids | None:
    """The tokens that min-p and top-k leave in, ascending; None: all of them."""
    ids = _likeliest(values, params.top_k, maxima) if 0 < params.top_k < len(values) else None
    if params.min_p > 0:
        floor = float(best) + params.temperature * math.log(params.min_p)  # where the weight is min-p of the best one's
        ids = (values >= floor).nonzero()[0] if ids is None else ids[values[ids] >= floor]
    return ids


def _weights(values: Float32s, best: np.float32, temperature: float) -> Float32s:
    """Probabilities relative to the likeliest token's, float32."""
    weights: Float32s = values - best
    if temperature != 1.0:
        weights /= np.float32(max(temperature, LEAST_TEMPERATURE))
    np.exp(weights, out=weights)
    return weights


def _stripe_maxima(values: Float32s) -> Float32s:
    """The largest of the values j, j + STRIPES, j + 2 * STRIPES, ... for each j; -inf where there are none."""
    whole = len(values) - len(values) % STRIPES
    maxima: Float32s = values[:whole].reshape(-1, STRIPES).max(0, initial=-math.inf)
    rest = values[whole:]
    np.maximum(maxima[: len(rest)], rest, out=maxima[: len(rest)])
    return maxima


def _likeliest(values: Float32s, count: int, maxima: Float32s) -> Ids:
    """The `count` tokens (1 to all) with the largest values and those tied with the last of them, ascending."""
    if count > len(maxima):
        return (~(values < _kth_largest(values, count))).nonzero()[0]
    # `count` stripes reach this bound, so at least so many tokens do; seldom many more, as they lie scattered.
    # Not `>=`: a row of NaN has to give tokens too, and every comparison with NaN is false.
    ids = (~(values < _kth_largest(maxima, count))).nonzero()[0]
    some = values[ids]
    return ids[~(some < _kth_largest(some, count))]


def _kth_largest(values: Float32s, k: int) -> np.float32:
    kth: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return kth


def _nucleus(weights: Float32s, share: float) -> Ids:
    """Top-p: the smallest set, likeliest first, that holds `share` of the sum, with ties at its border; ascending."""
    total = float(weights.sum(dtype=np.float64))
    parts = NUCLEUS_PARTS
    while True:
        places = (weights >= (1.0 - share) * total / parts).nonzero()[0]
        some = weights[places]
        # At twice as many parts as weights, all that lie below one part hold no more than half of what may be left out.
        if parts >= 2 * len(weights) or some.sum(dtype=np.float64) >= share * total:
            break
        parts *= 16
    likeliest = np.sort(some)[::-1]
    last = int(likeliest.cumsum(dtype=np.float64).searchsorted(share * total))
    kept: Ids = places[some >= likeliest[min(last, len(likeliest) - 1)]]
    return kept


def _inverse_cdf(weights: Float32s, number: float) -> int:
    """The first place at which the running share passes `number`, in (0, 1)."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), DRAW_BLOCK), dtype=np.float64)
    running = sums.cumsum()
    goal = number * float(running[-1])
    block = _first_above(running, goal)
    inside = weights[block * DRAW_BLOCK : (block + 1) * DRAW_BLOCK].cumsum(dtype=np.float64)
    return block * DRAW_BLOCK + _first_above(inside, goal - float(running[block] - sums[block]))


def _first_above(running: npt.NDArray[np.float64], goal: float) -> int:
    """First place where the running sum passes the goal; the last one that adds anything if rounding left none."""
    return int(min(running.searchsorted(goal, side="right"), running.searchsorted(running[-1])))
