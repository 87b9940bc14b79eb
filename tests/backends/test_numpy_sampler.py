"""The sampler on the host: each rule by a small example, all together against float64, against the one on tensors."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from weft.backends import sampler
from weft.backends.draw import uniform
from weft.backends.sampler import choose, describe, log_softmax
from weft.core.plan import SamplingRow
from weft.core.sampling import SamplingParams

VOCAB = 3000
"""More than there are stripes, and no multiple of them."""

PROMPT, OUTPUT = np.array([5, 5, 7, 9], np.int32), np.array([7, 11, 11, 11], np.int32)


def row(seed: int = 1, index: int = 0, **params: Any) -> SamplingRow:
    extra = {key: params.pop(key) for key in ("banned", "prompt_ids", "output_ids") if key in params}
    return SamplingRow(row=0, params=SamplingParams(**params), seed=seed, output_index=index, **extra)


def some_logits(count: int, vocabulary: int = VOCAB, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocabulary)) * scale).astype(np.float32)


def log_of(*shares: float) -> np.ndarray:
    """One row of logits with these probabilities."""
    return np.log(np.array([shares], np.float64)).astype(np.float32)


def reachable(logits: np.ndarray, **params: Any) -> set[int]:
    """The tokens that many draws from one row give."""
    rows = [row(seed=seed, **params) for seed in range(200)]
    return set(choose(np.repeat(logits, len(rows), 0), rows).tokens.tolist())


def processed(logits: np.ndarray, asked: SamplingRow) -> np.ndarray:
    """Bias, bans and penalties, token by token, in float64."""
    p, values = asked.params, logits.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        values[token] += bias
    values[list(asked.banned)] = -math.inf
    prompt = [] if asked.prompt_ids is None else asked.prompt_ids.tolist()
    output = [] if asked.output_ids is None else asked.output_ids.tolist()
    for token in dict.fromkeys(prompt + output):
        factor = 1 / p.repetition_penalty if values[token] > 0 else p.repetition_penalty
        values[token] *= factor
    for token in dict.fromkeys(output):
        values[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    return values


def expected_token(logits: np.ndarray, asked: SamplingRow) -> int:
    """One row, step by step over the whole vocabulary, in float64."""
    p, values = asked.params, processed(logits, asked)
    if p.temperature == 0:
        return int(values.argmax())
    values = values / p.temperature
    weights = np.exp(values - values.max())
    weights[weights < p.min_p] = 0
    if 0 < p.top_k < len(weights):
        weights[weights < np.sort(weights)[-p.top_k]] = 0
    if p.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        running = np.cumsum(weights[order]) / weights.sum()
        kept = running - weights[order] / weights.sum() < p.top_p
        weights[weights < weights[order[kept]].min()] = 0
    share = np.cumsum(weights) / weights.sum()
    return int(np.argmax(share > uniform(asked.seed, asked.output_index)))


def check(logits: np.ndarray, rows: list[SamplingRow]) -> None:
    chosen = choose(logits, rows).tokens.tolist()
    assert chosen == [expected_token(values, asked) for values, asked in zip(logits, rows, strict=True)]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_k": 2900},
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
def test_each_filter_against_float64(kind: dict[str, Any]) -> None:
    check(some_logits(40), [row(seed=seed, index=seed % 5, **kind) for seed in range(40)])


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    logits = np.zeros((2, 5000), np.float32)
    logits[0, [77, 78, 4000]] = 3.0
    assert choose(logits, [row(temperature=0.0), row(temperature=0.0)]).tokens.tolist() == [77, 0]


def test_temperature_sharpens_and_flattens() -> None:
    logits = log_of(0.9, 0.1)
    cold, warm = ([row(seed=seed, temperature=t) for seed in range(400)] for t in (0.25, 4.0))
    assert choose(np.repeat(logits, 400, 0), cold).tokens.sum() < 3  # 0.1^4 : 0.9^4 is 1 : 6561
    assert 120 < choose(np.repeat(logits, 400, 0), warm).tokens.sum() < 180  # 0.1^0.25 : 0.9^0.25 is 0.366 : 0.634


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = log_of(0.01, 0.5, 0.29, 0.2)
    assert reachable(logits, min_p=0.5) == {1, 2}
    assert reachable(logits, min_p=0.5, temperature=2.0) == {1, 2, 3}  # sqrt(0.2 : 0.5) is 0.63
    assert reachable(logits, min_p=1.0) == {1}


def test_top_k_keeps_the_k_likeliest_and_ties() -> None:
    logits = log_of(0.1, 0.2, 0.3, 0.2, 0.1, 0.1)
    assert reachable(logits, top_k=1) == {2}
    assert reachable(logits, top_k=2) == reachable(logits, top_k=3) == {1, 2, 3}
    assert reachable(logits, top_k=4) == reachable(logits, top_k=6) == reachable(logits) == {0, 1, 2, 3, 4, 5}
    assert reachable(logits, top_k=-1) == {0, 1, 2, 3, 4, 5}


def test_top_p_keeps_the_smallest_set_and_ties() -> None:
    logits = log_of(0.1, 0.2, 0.3, 0.2, 0.1, 0.1)
    assert reachable(logits, top_p=0.29) == reachable(logits, top_p=1e-9) == {2}
    assert reachable(logits, top_p=0.31) == reachable(logits, top_p=0.69) == {1, 2, 3}
    assert reachable(logits, top_p=0.71) == {0, 1, 2, 3, 4, 5}


def test_top_p_counts_what_top_k_and_min_p_leave() -> None:
    logits = log_of(0.4, 0.3, 0.2, 0.1)
    assert reachable(logits, top_p=0.5) == {0, 1}
    assert reachable(logits, top_p=0.5, top_k=2) == reachable(logits, top_p=0.5, min_p=0.7) == {0}  # 0.4 of 0.7


def test_bias_and_bans() -> None:
    logits = some_logits(3, seed=7)
    best = [int(token) for token in logits.argmax(1)]
    rows = [
        row(temperature=0.0, banned=(best[0],)),
        row(temperature=0.0, logit_bias={17: 100.0, best[1]: -100.0}),
        row(temperature=0.0, logit_bias={best[2]: -100.0, 4: 90.0, 2999: 30.0}, banned=(4, 4)),
    ]
    check(logits, rows)
    assert choose(logits, rows).tokens.tolist()[1:] == [17, 2999]


def test_penalties() -> None:
    told = {"temperature": 0.0, "prompt_ids": PROMPT, "output_ids": OUTPUT}
    logits = np.full((1, 20), -10.0, np.float32)
    logits[0, [5, 7, 11]] = (20.0, 19.0, -1.0)
    logits[0, 2] = 18.0
    assert choose(logits, [row(repetition_penalty=1.5, **told)]).tokens[0] == 2  # 20 and 19 become 13.3 and 12.7
    assert choose(logits, [row(presence_penalty=2.0, **told)]).tokens[0] == 5  # the prompt's tokens count not
    logits[0, [5, 7, 11]] = (0.0, 20.0, 21.0)
    assert choose(logits, [row(frequency_penalty=0.6, **told)]).tokens[0] == 7  # 20 - 0.6 beats 21 - 1.8
    assert choose(logits, [row(frequency_penalty=0.4, **told)]).tokens[0] == 11
    assert choose(logits, [row(presence_penalty=2.0, frequency_penalty=-0.5, **told)]).tokens[0] == 11
    logits[0, [5, 7, 11]] = (-4.0, -4.0, -4.0)
    logits[0, 2] = -5.0
    assert choose(logits, [row(repetition_penalty=1.5, **told)]).tokens[0] == 2  # -4 becomes -6
    check(logits, [row(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5, **told)])
    only_prompt = row(temperature=0.0, presence_penalty=2.0, repetition_penalty=2.0, prompt_ids=PROMPT)
    check(some_logits(1, seed=11), [only_prompt])


def test_everything_at_once() -> None:
    told = {"prompt_ids": PROMPT, "output_ids": OUTPUT, "banned": (3,), "logit_bias": {3: 9.0, 7: 8.0, 2999: 9.0}}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    rows = [row(seed=index, index=index, **KINDS[index % len(KINDS)], **told, **penalties) for index in range(50)]
    check(some_logits(50, seed=4), rows)


def test_real_vocabulary_size_with_flat_and_peaked_rows() -> None:
    """A nucleus of many thousand tokens takes several looks; a peaked one only one."""
    logits = some_logits(6, vocabulary=50_003, seed=2, scale=1.0)
    logits[3:] *= 8
    check(logits, [row(seed=index, top_p=0.9) for index in range(6)])
    check(logits, [row(seed=index + 9, top_p=0.97, min_p=0.001) for index in range(6)])
    check(np.zeros((3, 50_003), np.float32), [row(seed=1, top_p=0.999), row(seed=2, top_k=40), row(seed=3)])


def test_vocabularies_of_few_tokens() -> None:
    for vocabulary in (1, 2, 7):
        logits = some_logits(40, vocabulary=vocabulary, seed=vocabulary)
        kinds: list[dict[str, Any]] = [{"top_k": 5}, {"top_k": 2, "top_p": 0.8}, {"top_p": 0.8}, {}]
        check(logits, [row(seed=index, **kinds[index % 4]) for index in range(40)])


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 6000 seeds and positions; 39 is the 99.9th percentile at 17 degrees of freedom and more."""
    logits = some_logits(1, vocabulary=16, seed=3, scale=1.0)
    exact = np.exp(logits[0].astype(np.float64)) / np.exp(logits[0].astype(np.float64)).sum()
    rows = [row(seed=number // 3, index=number % 3) for number in range(6000)]
    counts = np.bincount(choose(np.repeat(logits, 6000, 0), rows).tokens, minlength=16)
    assert (((counts - 6000 * exact) ** 2) / (6000 * exact)).sum() < 39


def test_evenly_spread_numbers_give_each_token_its_share() -> None:
    weights = np.random.default_rng(3).random(3000).astype(np.float32)
    weights[[0, 1500, 2999]] = 0.0
    numbers = (np.arange(30_000) + 0.5) / 30_000
    counts = np.bincount([sampler._inverse_cdf(weights, float(number)) for number in numbers[::3]], minlength=3000)
    assert np.abs(counts / 10_000 - weights / weights.sum(dtype=np.float64)).max() < 1 / 9_999
    assert counts[[0, 1500, 2999]].sum() == 0
    assert sampler._inverse_cdf(np.ones(2, np.float32), 0.5) == 1  # reaching the number is not passing it
    assert sampler._inverse_cdf(weights, 1.0) == 2998  # rounding may bring the goal to the whole sum


def test_seed_and_position_fix_the_draw() -> None:
    logits = some_logits(1)
    same = {int(choose(logits, [row(seed=9, index=4)]).tokens[0]) for _ in range(5)}
    others = {int(choose(logits, [row(seed=9, index=index)]).tokens[0]) for index in range(20)}
    assert len(same) == 1 and len(others) > 5


def test_nothing_depends_on_company_or_order() -> None:
    logits = some_logits(34, seed=5)
    logits[20, 3] = math.nan
    rows = [row(seed=index, index=3, logprobs=2, **KINDS[index % len(KINDS)]) for index in range(34)]
    together, backwards = choose(logits, rows), choose(logits[::-1], rows[::-1])
    assert together.tokens.tolist() == backwards.tokens[::-1].tolist()
    for index in range(34):
        alone = choose(logits[[index]], [rows[index]])
        assert alone.tokens[0] == together.tokens[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index) == backwards.logprobs.get(33 - index)


def test_small_noise_does_not_move_choices() -> None:
    logits = some_logits(50, seed=6)
    noisy = logits + np.random.default_rng(1).uniform(-1e-5, 1e-5, logits.shape).astype(np.float32)
    rows = [row(seed=index, top_p=0.95, temperature=0.8) for index in range(50)]
    assert choose(logits, rows).tokens.tolist() == choose(noisy, rows).tokens.tolist()


def test_logits_are_only_read() -> None:
    """Views of memory that cannot be written, in any layout."""
    logits = some_logits(17, seed=12)
    told = {"banned": (1, 2), "logit_bias": {3: 4.0}, "prompt_ids": PROMPT, "output_ids": OUTPUT}
    rows = [row(seed=i, logprobs=3, repetition_penalty=1.3, **KINDS[i], **told) for i in range(17)]
    plain = [row(seed=i, **KINDS[i]) for i in range(17)]
    for asked in (rows, plain):
        expected = choose(logits.copy(), asked)
        view = np.frombuffer(logits.tobytes(), np.float32).reshape(logits.shape)
        assert not view.flags.writeable
        wide = np.zeros((17, 2 * VOCAB), np.float32)
        wide[:, ::2] = logits
        for given in (view, np.asfortranarray(logits), wide[:, ::2]):
            assert choose(given, asked).tokens.tolist() == expected.tokens.tolist()
            assert np.array_equal(given, logits)


def test_rows_without_a_choice_fail_alone() -> None:
    logits = some_logits(8, seed=8)
    best = int(logits[7].argmax())
    logits[[0, 6], 100] = math.nan
    logits[1] = -math.inf
    logits[[2, 5], 5] = math.inf
    everything = tuple(range(VOCAB))
    rows = [
        row(top_k=5, logprobs=1),
        row(temperature=0.0),
        row(logprobs=2),
        row(banned=everything, logprobs=1),
        row(banned=everything, temperature=0.0),
        row(banned=(5,), temperature=0.0),
        row(temperature=0.0, repetition_penalty=1.1, output_ids=OUTPUT),
        row(temperature=0.0, logprobs=1),
    ]
    with np.errstate(all="raise"):
        choices = choose(logits, rows)
    assert choices.tokens.tolist() == [-1] * 7 + [best] and choices.tokens.dtype == np.int32
    assert sorted(choices.errors) == [0, 1, 2, 3, 4, 5, 6] and list(choices.logprobs) == [7]
    assert all("no finite logits" in choices.errors[index] for index in (0, 1, 2, 5, 6))
    assert all("leave no token" in choices.errors[index] for index in (3, 4))


def test_bias_that_leaves_the_only_token_to_nobody() -> None:
    """All but one token masked by the model itself, and that one banned."""
    logits = np.full((2, 300), -math.inf, np.float32)
    logits[:, 123] = 1.0
    choices = choose(logits, [row(logit_bias={5: 100.0}, banned=(123,)), row(top_p=0.9, top_k=40)])
    assert choices.tokens.tolist() == [-1, 123] and "leave no token" in choices.errors[0]


def test_penalties_beyond_the_range_of_float32_fail_alone() -> None:
    rows = [row(repetition_penalty=1e-42, output_ids=OUTPUT), row(repetition_penalty=1e-60, output_ids=OUTPUT), row()]
    logits = np.abs(some_logits(3, seed=14))
    logits[1, 7] = 0.0
    choices = choose(logits, rows)
    assert sorted(choices.errors) == [0, 1] and choices.tokens[2] >= 0
    assert all("out of range" in message for message in choices.errors.values())


def test_extreme_temperatures_and_logits() -> None:
    logits = some_logits(4, seed=13)
    logits[3, :2] = (3e38, -3e38)
    with np.errstate(all="raise"):
        cold = choose(
            logits, [row(temperature=1e-60, top_p=0.9), row(temperature=1e-300), row(temperature=1e-5), row()]
        )
    assert cold.tokens.tolist() == logits.argmax(1).tolist() and not cold.errors
    rows = [row(seed=seed, temperature=100.0, min_p=1e-300) for seed in range(3)]
    assert len(set(choose(logits[:3], rows).tokens.tolist())) == 3


def test_no_rows_and_wrong_numbers_of_rows() -> None:
    assert choose(np.zeros((0, 10), np.float32), []).tokens.shape == (0,)
    with pytest.raises(ValueError):
        choose(np.zeros((2, 10), np.float32), [row()])


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = some_logits(3, seed=9)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    rows = [
        row(temperature=0.0, logprobs=0, logit_bias={42: 100.0}),
        row(temperature=0.5, top_k=3, logprobs=5, seed=3),
        row(temperature=1.0, logprobs=64, seed=4, banned=(1,)),
    ]
    choices = choose(logits, rows)
    assert choices.tokens[0] == 42
    for index, count in enumerate((0, 5, 64)):
        entry = choices.logprobs[index]
        assert entry.token_id == choices.tokens[index]
        assert entry.logprob == pytest.approx(exact[index, entry.token_id], abs=1e-6)
        best = np.argsort(-exact[index], kind="stable")[:count]
        assert list(entry.top_ids) == best.tolist()
        assert entry.top_logprobs == pytest.approx(exact[index, best].tolist(), abs=1e-6)


def test_log_softmax_and_describe() -> None:
    logits = np.concatenate((log_of(0.1, 0.4, 0.1, 0.4), np.array([[0, -np.inf, 900, 900]], np.float32)))
    scores = log_softmax(logits)
    half = math.log(0.5)
    assert scores.dtype == np.float32 and scores[0] == pytest.approx(np.log([0.1, 0.4, 0.1, 0.4]), abs=1e-6)
    assert scores[1].tolist() == pytest.approx([-900 + half, -math.inf, half, half])
    first, second = describe(scores, np.array([2, 1]), [3, 9])
    assert (first.token_id, first.top_ids) == (2, (1, 3, 0))  # equals: the lowest first
    assert first.logprob == first.top_logprobs[2] == float(scores[0, 2])
    assert (second.logprob, second.top_ids) == (-math.inf, (2, 3, 0, 1))  # no more than there are
    assert describe(scores, np.array([0, 0]), [0, 0])[0].top_ids == ()


def test_log_softmax_of_rows_that_are_not_finite() -> None:
    logits = some_logits(4, seed=10)
    logits[0, 5], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    with np.errstate(all="raise"):
        scores = log_softmax(logits)
        entries = describe(scores, np.array([1, 2, 3, 4]), [2, 2, 2, 2])
    assert np.isnan(scores[:3]).all() and np.isfinite(scores[3]).all()
    assert all(math.isnan(entry.logprob) and len(entry.top_ids) == 2 for entry in entries[:3])


def random_row(random: np.random.Generator, vocabulary: int) -> SamplingRow:
    """Each rule in every third row or so."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if random.random() < 0.35 else otherwise

    return row(
        seed=int(random.integers(2**62)),
        index=int(random.integers(100)),
        temperature=sometimes(0.0, float(random.uniform(0.1, 3.0))),
        top_k=int(sometimes(random.integers(1, vocabulary + 10), 0)),
        top_p=float(sometimes(random.uniform(0.01, 1.0), 1.0)),
        min_p=float(sometimes(random.uniform(0.0, 0.3), 0.0)),
        presence_penalty=float(sometimes(random.uniform(-2, 2), 0.0)),
        frequency_penalty=float(sometimes(random.uniform(-2, 2), 0.0)),
        repetition_penalty=float(sometimes(random.uniform(0.5, 2.0), 1.0)),
        logit_bias=sometimes({int(token): float(random.uniform(-9, 9)) for token in random.integers(0, 200, 5)}, {}),
        logprobs=sometimes(int(random.integers(0, 20)), None),
        banned=sometimes(tuple(random.integers(0, vocabulary, 3).tolist()), ()),
        prompt_ids=random.integers(0, vocabulary, 30).astype(np.int32),
        output_ids=random.integers(0, vocabulary, 30).astype(np.int32),
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Rows this small are not worth a second thread, and starting it takes seconds where processors are shared."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_equal_to_the_sampler_on_tensors(one_thread: None) -> None:
    """The same tokens but for borders and draws that float32 rounding moves: at most 3 of 800."""
    import torch

    from weft.backends.torch import sampler as on_tensors

    random, differing = np.random.default_rng(77), 0
    for batch in range(40):
        vocabulary = (200, 2500, 9000)[batch % 3]
        logits = some_logits(20, vocabulary=vocabulary, seed=batch, scale=float(random.uniform(0.5, 5.0)))
        logits[7, 50] = (math.nan, math.inf, 1.0)[batch // 3 % 3]
        rows = [random_row(random, vocabulary) for _ in range(20)]
        mine, theirs = choose(logits, rows), on_tensors.choose(torch.from_numpy(logits.copy()), rows)
        assert mine.errors == theirs.errors and mine.logprobs.keys() == theirs.logprobs.keys()
        differing += int((mine.tokens != theirs.tokens).sum())
        for index, entry in mine.logprobs.items():
            other = theirs.logprobs[index]
            assert entry.top_ids == other.top_ids
            assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
            if entry.token_id == other.token_id:
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert differing <= 3


def test_needs_no_torch() -> None:
    command = "import sys, weft.backends.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=60).returncode == 0
