"""The sampler against expectations written out in numpy, rule by rule, over the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.draw import uniform
from weft.backends.torch import sampler
from weft.backends.torch.sampler import choose
from weft.core.plan import SamplingRow
from weft.core.sampling import SamplingParams

VOCAB = 3000


def row(seed: int = 1, index: int = 0, **params: Any) -> SamplingRow:
    extra = {key: params.pop(key) for key in ("banned", "prompt_ids", "output_ids") if key in params}
    return SamplingRow(row=0, params=SamplingParams(**params), seed=seed, output_index=index, **extra)


def some_logits(count: int, vocabulary: int = VOCAB, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocabulary)) * scale).astype(np.float32)


def expected_token(logits: np.ndarray, asked: SamplingRow) -> int:
    """One row, step by step, in float64."""
    p, values = asked.params, logits.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        values[token] += bias
    values[list(asked.banned)] = -math.inf
    prompt = [] if asked.prompt_ids is None else asked.prompt_ids.tolist()
    output = [] if asked.output_ids is None else asked.output_ids.tolist()
    for token in dict.fromkeys(prompt + output):
        values[token] = (
            values[token] / p.repetition_penalty if values[token] > 0 else values[token] * p.repetition_penalty
        )
    for token in dict.fromkeys(output):
        values[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    if p.temperature == 0:
        return int(values.argmax())
    values = values / p.temperature
    weights = np.exp(values - values.max())
    weights[weights < p.min_p] = 0
    if p.top_k > 0:
        weights[weights < np.sort(weights)[-p.top_k]] = 0
    if p.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        running = np.cumsum(weights[order]) / weights.sum()
        before = running - weights[order] / weights.sum()
        weights[order[before >= p.top_p]] = 0
    share = np.cumsum(weights) / weights.sum()
    return int(np.argmax(share > uniform(asked.seed, asked.output_index)))


def check(logits: np.ndarray, rows: list[SamplingRow]) -> None:
    chosen = choose(torch.from_numpy(logits.copy()), rows).tokens.tolist()
    assert chosen == [expected_token(values, asked) for values, asked in zip(logits, rows, strict=True)]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"top_p": 0.999, "temperature": 50.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.01, "top_k": 50, "top_p": 0.8, "temperature": 1.7},
    {"top_k": 3, "top_p": 0.7, "temperature": 2.0},
    {"top_k": 1500, "top_p": 0.9, "temperature": 30.0},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_filter(kind: dict[str, Any]) -> None:
    check(some_logits(40), [row(seed=seed, index=seed % 5, **kind) for seed in range(40)])


def test_all_kinds_in_one_batch() -> None:
    rows = [row(seed=index, index=index, **KINDS[index % len(KINDS)]) for index in range(60)]
    check(some_logits(60, seed=4), rows)


def test_real_vocabulary_size_with_flat_and_peaked_rows() -> None:
    """A nucleus of many thousand tokens needs more than the first candidates; a peaked one only a few."""
    logits = some_logits(6, vocabulary=50_003, seed=2, scale=1.0)
    logits[3:] *= 8
    check(logits, [row(seed=index, top_p=0.9) for index in range(6)])
    check(logits, [row(seed=index + 9, top_p=0.97, min_p=0.001) for index in range(6)])


def test_nothing_depends_on_company_or_order() -> None:
    logits = some_logits(20, seed=5)
    rows = [row(seed=index, index=3, **KINDS[index % len(KINDS)]) for index in range(20)]
    together = choose(torch.from_numpy(logits.copy()), rows).tokens
    alone = [choose(torch.from_numpy(logits[[i]].copy()), [rows[i]]).tokens[0] for i in range(20)]
    backwards = choose(torch.from_numpy(logits[::-1].copy()), rows[::-1]).tokens[::-1]
    assert together.tolist() == alone == backwards.tolist()


def test_small_noise_does_not_move_choices() -> None:
    logits = some_logits(50, seed=6)
    noisy = logits + np.random.default_rng(1).uniform(-1e-5, 1e-5, logits.shape).astype(np.float32)
    rows = [row(seed=index, top_p=0.95, temperature=0.8) for index in range(50)]
    assert (
        choose(torch.from_numpy(logits), rows).tokens.tolist() == choose(torch.from_numpy(noisy), rows).tokens.tolist()
    )


def test_seed_and_position_fix_the_draw() -> None:
    logits = torch.from_numpy(some_logits(1))
    same = {int(choose(logits.clone(), [row(seed=9, index=4)]).tokens[0]) for _ in range(5)}
    others = {int(choose(logits.clone(), [row(seed=9, index=index)]).tokens[0]) for index in range(20)}
    assert len(same) == 1 and len(others) > 5


def test_bias_bans_and_penalties() -> None:
    prompt, output = np.array([5, 5, 7, 9], np.int32), np.array([7, 11, 11, 11], np.int32)
    logits = some_logits(8, seed=7)
    best = logits.argmax(1)
    told = {"prompt_ids": prompt, "output_ids": output}
    logits[3, [5, 7, 11]] = (20.0, 19.0, -1.0)
    logits[4, [7, 11]] = (20.0, 21.0)
    logits[5, [7, 11]] = (20.0, 21.0)
    rows = [
        row(temperature=0.0, banned=(int(best[0]),)),
        row(temperature=0.0, logit_bias={17: 100.0, int(best[1]): -100.0}),
        row(temperature=0.0, logit_bias={int(best[2]): -100.0, 4: 3.0}, banned=(4,)),
        row(temperature=0.0, repetition_penalty=1.5, **told),
        row(temperature=0.0, frequency_penalty=0.6, **told),
        row(temperature=0.0, presence_penalty=2.0, frequency_penalty=-1.0, **told),
        row(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, top_p=0.9, **told),
        row(temperature=1.0, logit_bias={3: 8.0, 2999: 9.0}, top_k=5),
    ]
    check(logits, rows)
    assert choose(torch.from_numpy(logits[[4]].copy()), [rows[4]]).tokens.tolist() == [7]  # 20 - 0.6 beats 21 - 1.8
    check(logits[[3]], [row(temperature=0.0, repetition_penalty=2.0, prompt_ids=prompt)])
    check(logits[[3]], [row(temperature=0.0, presence_penalty=2.0, prompt_ids=prompt, output_ids=prompt[:0])])


def test_ties_go_to_the_lowest_id_and_are_kept_together() -> None:
    logits = np.zeros((2, 5000), np.float32)
    logits[0, [77, 78, 4000]] = 3.0
    assert choose(torch.from_numpy(logits.copy()), [row(temperature=0.0), row(temperature=0.0)]).tokens.tolist() == [
        77,
        0,
    ]
    rows = [row(seed=seed, top_k=2) for seed in range(60)]
    chosen = choose(torch.from_numpy(np.repeat(logits[:1], 60, 0)), rows).tokens.tolist()
    assert set(chosen) == {77, 78, 4000}


def test_rows_without_a_choice_fail_alone() -> None:
    logits = some_logits(5, seed=8)
    best = int(logits[4].argmax())
    logits[0, 100] = math.nan
    logits[1] = -math.inf
    logits[2, 5] = math.inf
    rows = [
        row(),
        row(temperature=0.0),
        row(logprobs=2),
        row(banned=tuple(range(VOCAB))),
        row(temperature=0.0, logprobs=1),
    ]
    choices = choose(torch.from_numpy(logits), rows)
    assert list(choices.tokens) == [-1, -1, -1, -1, best]
    assert sorted(choices.errors) == [0, 1, 2, 3] and "no finite logits" in choices.errors[0]
    assert "leave no token" in choices.errors[3]
    assert list(choices.logprobs) == [4]
    drawn = choose(
        torch.from_numpy(logits[:4]), [row(logprobs=1), row(), row(), row(logprobs=1, banned=rows[3].banned)]
    )
    assert sorted(drawn.errors) == [0, 1, 2, 3] and list(drawn.tokens) == [-1] * 4 and not drawn.logprobs


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = some_logits(3, seed=9)
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    rows = [
        row(temperature=0.0, logprobs=0, logit_bias={42: 100.0}),
        row(temperature=0.5, top_k=3, logprobs=5, seed=3),
        row(temperature=1.0, logprobs=64, seed=4),
    ]
    choices = choose(torch.from_numpy(logits.copy()), rows)
    assert choices.tokens[0] == 42
    for index, count in enumerate((0, 5, 64)):
        entry = choices.logprobs[index]
        assert entry.token_id == choices.tokens[index]
        assert entry.logprob == pytest.approx(exact[index, entry.token_id], abs=1e-5)
        best = np.argsort(-exact[index], kind="stable")[:count]
        assert list(entry.top_ids) == best.tolist()
        assert entry.top_logprobs == pytest.approx(exact[index, best].tolist(), abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    """Over evenly spread draws each token comes up as often as its probability says."""
    logits = some_logits(1, vocabulary=50, seed=3, scale=1.0)
    weights = torch.zeros(4001, 1, sampler.DRAW_BLOCK)
    weights[:, 0, :50] = torch.from_numpy(np.exp(logits[0]))
    numbers = (torch.arange(4001, dtype=torch.float64) + 0.5) / 4001
    counts = np.bincount(sampler._inverse_cdf(weights, numbers).numpy(), minlength=50)
    exact = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert np.abs(counts / 4001 - exact).max() < 1 / 4000


@pytest.mark.parametrize("extreme", [{"temperature": 1e-50}, {"repetition_penalty": 1e-42, "temperature": 1.0}])
def test_extreme_parameters_reach_no_neighbour(extreme: dict[str, Any]) -> None:
    """Found beside the numpy sampler: the whole step failed."""
    output = np.arange(50, dtype=np.int32)
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(5)).abs()
    strange = SamplingRow(0, SamplingParams(**extreme), 1, 0, (), output[:1], output)
    choices = choose(logits.clone(), [strange, row(temperature=1.0)])
    alone = choose(logits[1:].clone(), [row(temperature=1.0)])
    assert choices.tokens[1] == alone.tokens[0] and 1 not in choices.errors
    if "temperature" in extreme and extreme["temperature"] < 1:
        assert choices.tokens[0] == int(logits[0].argmax())
    else:
        assert "out of range" in choices.errors[0]
