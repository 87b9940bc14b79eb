"""Chooses tokens from logits, on tensors.

Order, as documented in core/sampling.py: logit bias, banned tokens, penalties, then the likeliest token (temperature 0)
or temperature, min-p, top-k, top-p and a draw. Log probabilities are of the logits as the model gave them.

What fixes a choice, so that equal requests give equal text whatever else is in the batch:
- Ties go to the lowest token id; tokens tied at a top-k or top-p border are all kept.
- A draw takes one number u per row from `draw.uniform(seed, output_index)` and picks the first token, in order of token
  id, at which the running sum of probabilities passes u. So noise of 1e-6 in logits moves a choice about as rarely.

Sources: nucleus sampling (Holtzman et al., arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082), repetition
penalty (Keskar et al., arXiv:1909.05858), presence and frequency penalties as in OpenAI's API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from weft.backends.draw import uniforms
from weft.backends.sampler import LEAST_TEMPERATURE, Choices
from weft.core.plan import Int32s, SamplingRow, TokenLogprobs

NUCLEUS_CANDIDATES = 1024
"""Top-p looks among so many of the likeliest tokens first and sorts the whole vocabulary only if they fall short."""

DRAW_BLOCK = 1024
"""Probabilities are summed in blocks of so many; only the block that holds the draw is summed token by token."""

ROWS_AT_ONCE = 4
"""Rows drawn together: so few that their logits stay near the processor and the working memory stays small."""


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Choices:
    """logits float32 [E, vocabulary], changed in place; one `SamplingRow` each."""
    if any(row.params.greedy for row in rows):
        best, tokens = logits.max(-1)  # the first of equals, and NaN if there is one
    else:
        best, tokens = logits.amax(-1), torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    errors = {
        index: "the model returned no finite logits for this request"
        for index in (~torch.isfinite(best)).nonzero().flatten().tolist()
    }
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None and index not in errors]
    scores = log_softmax(logits[wanted]) if wanted else None
    changed = _process(logits, rows)
    if changed:
        best[changed], tokens[changed] = logits[changed].max(-1)
        for index, value in zip(changed, best[changed].tolist(), strict=True):
            if value == -math.inf:
                errors.setdefault(index, "bias and banned tokens leave no token to choose")
            elif not math.isfinite(value):
                errors.setdefault(index, "the penalties of this request take its logits out of range")
    drawing = [index for index, row in enumerate(rows) if not row.params.greedy and index not in errors]
    for start in range(0, len(drawing), ROWS_AT_ONCE):
        some = drawing[start : start + ROWS_AT_ONCE]
        run = some[-1] - some[0] == len(some) - 1  # neighbours need no copy
        these = logits[some[0] : some[-1] + 1] if run else logits[some]
        tokens[some] = draw(these - best[some][:, None], [rows[index] for index in some])
    chosen = tokens.cpu().numpy().astype(np.int32)
    chosen[list(errors)] = -1
    logprobs = {}
    if scores is not None:
        counts = [rows[index].params.logprobs or 0 for index in wanted]
        entries = describe(scores, tokens[wanted], counts)
        logprobs = {index: entry for index, entry in zip(wanted, entries, strict=True) if index not in errors}
    return Choices(chosen, logprobs, errors)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Natural logarithms of probabilities, float32."""
    return torch.log_softmax(logits.float(), -1)


def describe(scores: torch.Tensor, targets: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """scores float32 [n, vocabulary], targets int64 [n], how many of the best each wants -> one entry per row."""
    own = scores.gather(1, targets[:, None]).flatten().tolist()
    top = min(max(counts, default=0), scores.shape[1])
    values, ids = scores.topk(top, -1) if top else (scores[:, :0], targets[:, None][:, :0])
    entries = []
    columns = zip(targets.tolist(), own, counts, values.tolist(), ids.tolist(), strict=True)
    for token, logprob, count, row_values, row_ids in columns:
        best = sorted(zip(row_values[:count], row_ids[:count], strict=True), key=lambda pair: (-pair[0], pair[1]))
        entries.append(TokenLogprobs(token, logprob, tuple(i for _, i in best), tuple(v for v, _ in best)))
    return entries


def _process(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Applies bias, bans and penalties in place; the indices of rows that any of them touched."""
    changed: dict[int, None] = {}
    entries: list[tuple[int, int, float]] = []
    for index, row in enumerate(rows):
        for token, bias in row.params.logit_bias.items():
            entries.append((index, token, bias))
        for token in row.banned:
            entries.append((index, token, -math.inf))
        if row.params.logit_bias or row.banned:
            changed[index] = None
    if entries:
        columns = np.array(entries, np.float64)
        where = _pairs(columns[:, 0], columns[:, 1], logits)
        logits.index_put_(where, torch.from_numpy(columns[:, 2]).to(logits), accumulate=True)
    penalised = [index for index, row in enumerate(rows) if row.params.has_penalties]
    if penalised:
        _penalise(logits, rows, penalised)
    changed.update(dict.fromkeys(penalised))
    return list(changed)


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow], penalised: Sequence[int]) -> None:
    """Repetition over prompt and output, presence and frequency over the output alone."""
    repeated: list[tuple[int, Int32s, float]] = []
    produced: list[tuple[int, Int32s, np.ndarray]] = []
    empty = np.empty(0, np.int32)
    for index in penalised:
        row, params = rows[index], rows[index].params
        prompt = empty if row.prompt_ids is None else row.prompt_ids
        output = empty if row.output_ids is None else row.output_ids
        if params.repetition_penalty != 1.0:
            repeated.append((index, np.unique(np.concatenate((prompt, output))), params.repetition_penalty))
        ids, counts = np.unique(output, return_counts=True)
        produced.append((index, ids, params.presence_penalty + params.frequency_penalty * counts))
    if repeated:
        where = _pairs(_spread([(row, ids) for row, ids, _ in repeated]), [ids for _, ids, _ in repeated], logits)
        factors = _spread([(factor, ids) for _, ids, factor in repeated])
        penalty = torch.from_numpy(factors).to(logits)
        values = logits[where]
        logits[where] = torch.where(values > 0, values / penalty, values * penalty)
    where = _pairs(_spread([(row, ids) for row, ids, _ in produced]), [ids for _, ids, _ in produced], logits)
    logits[where] -= torch.from_numpy(np.concatenate([amounts for _, _, amounts in produced])).to(logits)


def _spread(pairs: Sequence[tuple[float, Int32s]]) -> np.ndarray:
    """Each number repeated as often as its ids are many."""
    return np.concatenate([np.full(len(ids), number, np.float64) for number, ids in pairs])


def _pairs(
    rows: np.ndarray, tokens: np.ndarray | Sequence[Int32s], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) index pairs as tensors."""
    flat = tokens if isinstance(tokens, np.ndarray) else np.concatenate(tokens)
    return (
        torch.from_numpy(rows.astype(np.int64)).to(logits.device),
        torch.from_numpy(flat.astype(np.int64)).to(logits.device),
    )


def draw(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Temperature, min-p, top-k, top-p, then one draw a row.

    scaled [n, vocabulary]: logits less the row's largest, changed in place -> int64 [n].
    """
    params = [row.params for row in rows]
    if any(p.temperature != 1.0 for p in params):
        scaled /= _column([max(p.temperature, LEAST_TEMPERATURE) for p in params], scaled)
    floors = _column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], scaled)
    count, vocabulary = scaled.shape
    blocks = -(-vocabulary // DRAW_BLOCK)
    weights = scaled.new_zeros(count, blocks * DRAW_BLOCK)
    visible = weights[:, :vocabulary]
    torch.exp(scaled, out=visible)
    limits = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    cut = [index for index, p in enumerate(params) if limits[index] < vocabulary or p.top_p < 1.0]
    if cut:
        floors[cut] = _cut_floors(scaled[cut], floors[cut], [limits[i] for i in cut], [params[i].top_p for i in cut])
    if cut or any(p.min_p > 0 for p in params):
        visible.masked_fill_(scaled < floors, 0.0)
    numbers = torch.from_numpy(uniforms([row.seed for row in rows], [row.output_index for row in rows]))
    return _inverse_cdf(weights.view(count, blocks, DRAW_BLOCK), numbers.to(scaled.device))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _cut_floors(
    scaled: torch.Tensor, floors: torch.Tensor, limits: Sequence[int], top_ps: Sequence[float]
) -> torch.Tensor:
    """The lowest scaled logit that min-p (given as `floors`), top-k and top-p leave in; [n, 1]."""
    count, vocabulary = scaled.shape
    deepest = max((limit for limit in limits if limit < vocabulary), default=0)
    if any(p < 1.0 for p in top_ps):
        deepest = max(deepest, NUCLEUS_CANDIDATES)
    likeliest = _likeliest(scaled, min(deepest, vocabulary))
    places = torch.tensor([min(limit, likeliest.shape[1]) - 1 for limit in limits], device=scaled.device)[:, None]
    limited = torch.tensor([limit < vocabulary for limit in limits], device=scaled.device)[:, None]
    floors = torch.where(limited, torch.maximum(floors, likeliest.gather(1, places)), floors)
    nucleus = [index for index in range(count) if top_ps[index] < 1.0]
    if nucleus:
        wanted = _column([top_ps[index] for index in nucleus], scaled).double()
        floors[nucleus] = _nucleus_floors(scaled[nucleus], floors[nucleus], likeliest[nucleus], wanted)
    return floors


def _likeliest(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, descending. On CPU numpy sorts several times faster than PyTorch."""
    if scaled.device.type != "cpu":
        return scaled.topk(count, -1).values
    values = scaled.numpy()
    if count < values.shape[1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _nucleus_floors(
    scaled: torch.Tensor, floors: torch.Tensor, likeliest: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Top-p among what the floors leave: the fewest tokens, likeliest first, whose share reaches `wanted`; [n, 1]."""
    left = scaled.exp().masked_fill_(scaled < floors, 0.0)
    goal = left.sum(-1, keepdim=True, dtype=torch.float64) * wanted
    shares = likeliest.exp().masked_fill_(likeliest < floors, 0.0).double()
    running = shares.cumsum(-1)
    short = (running[:, -1:] < goal).flatten() & (likeliest[:, -1:] > floors).flatten()
    if likeliest.shape[1] < scaled.shape[1] and bool(short.any()):
        some = short.nonzero().flatten()
        everything = _likeliest(scaled[some], scaled.shape[1])
        floors = floors.clone()
        floors[some] = _nucleus_floors(scaled[some], floors[some], everything, wanted[some])
        rest = (~short).nonzero().flatten()
        if rest.numel():
            floors[rest] = _nucleus_floors(scaled[rest], floors[rest], likeliest[rest], wanted[rest])
        return floors
    kept = ((running - shares) < goal).sum(-1, keepdim=True).clamp_(min=1)  # those that something is missing before
    return torch.maximum(floors, likeliest.gather(1, kept - 1))


def _inverse_cdf(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """weights float32 [n, blocks, DRAW_BLOCK], numbers float64 [n] in (0, 1) -> token index int64 [n]."""
    sums = weights.sum(-1).double()
    running = sums.cumsum(-1)
    goal = numbers[:, None] * running[:, -1:]
    block = _first_above(running, goal)
    before = running.gather(1, block) - sums.gather(1, block)
    inside = weights[torch.arange(weights.shape[0], device=weights.device), block[:, 0]].double().cumsum(-1)
    return (block * weights.shape[2] + _first_above(inside, goal - before)).flatten()


def _first_above(running: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """First place where the running sum passes the goal; the last one that adds anything if rounding left none."""
    place = torch.searchsorted(running, goal, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous(), right=False)
    return torch.minimum(place, last)
