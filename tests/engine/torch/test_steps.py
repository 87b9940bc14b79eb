"""What a step reports: log probabilities, prompt log probabilities, seeds in company, rows that fail alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.torch.harness import Driver, Sequence_, random_prompts
from tests.engine.torch.zoo import VOCAB, Zoo, logits
from weft.backends.torch import backend as backend_module
from weft.backends.torch.backend import TorchBackend
from weft.core.sampling import SamplingParams


@pytest.fixture(params=["qwen3", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(zoo: Zoo, name: str) -> TorchBackend:
    backend = TorchBackend(zoo.path(name))
    backend.load()
    return backend


def test_logprobs_equal_a_forward_pass_of_the_library(zoo: Zoo, name: str, backend: TorchBackend) -> None:
    prompts = random_prompts((9, 30), VOCAB)
    params = [SamplingParams(temperature=0.0, logprobs=4), SamplingParams(temperature=0.8, logprobs=0)]
    sequences = [Sequence_(i, prompt, params[i], seed=i) for i, prompt in enumerate(prompts)]
    Driver(backend).generate(sequences, 6)
    for sequence, asked in zip(sequences, params, strict=True):
        exact = torch.log_softmax(logits(zoo.model(name), sequence.tokens).double(), -1)[len(sequence.prompt) - 1 : -1]
        assert len(sequence.results) == 6
        for step, (result, where) in enumerate(zip(sequence.results, sequence.rows, strict=True)):
            entry = result.logprobs[where]
            assert entry.token_id == sequence.output[step]
            assert entry.logprob == pytest.approx(float(exact[step, entry.token_id]), abs=2e-4)
            best = exact[step].topk(asked.logprobs or 0)
            assert list(entry.top_ids) == best.indices.tolist()
            assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_logprobs(
    zoo: Zoo, name: str, backend: TorchBackend, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "LOGITS_AT_ONCE", 5 * VOCAB)  # several portions
    [prompt, other] = random_prompts((31, 12), VOCAB)
    sequence = Sequence_(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3))
    Driver(backend).generate([Sequence_(1, other), sequence], 2, chunk)
    entries = [
        entry
        for r, row in zip(sequence.results, sequence.rows, strict=True)
        for entry in r.prompt_logprobs.get(row, [])
    ]
    exact = torch.log_softmax(logits(zoo.model(name), prompt).double(), -1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(exact[place, entry.token_id]), abs=2e-4)
        assert list(entry.top_ids) == exact[place].topk(3).indices.tolist()
        assert entry.top_logprobs == pytest.approx(exact[place].topk(3).values.tolist(), abs=2e-4)


def test_seeded_text_is_the_same_in_company(backend: TorchBackend) -> None:
    prompts = random_prompts((9, 30, 4, 50), VOCAB)
    params = SamplingParams(temperature=1.0, top_p=0.95)
    alone = [Driver(backend).generate([Sequence_(0, p, params, seed=i)], 12)[0] for i, p in enumerate(prompts)]
    company = [Sequence_(i, p, params, seed=i) for i, p in enumerate(prompts)]
    assert Driver(backend, page_size=16).generate(company, 12, chunk=7) == alone
    other = Driver(backend).generate([Sequence_(0, prompts[0], params, seed=99)], 12)[0]
    assert other != alone[0]


def test_penalties_and_bans_reach_the_sampler(zoo: Zoo, name: str, backend: TorchBackend) -> None:
    [prompt] = random_prompts((9,), VOCAB)
    strict = SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=100.0)
    [output] = Driver(backend).generate([Sequence_(0, prompt, strict)], 20)
    assert len(set(output)) == 20
    free = Driver(backend).generate([Sequence_(0, prompt)], 3)[0]
    banned = Driver(backend).generate([Sequence_(0, prompt, banned=(free[0],))], 1)[0]
    second = logits(zoo.model(name), prompt)[-1].topk(2).indices.tolist()
    assert [free[0], banned[0]] == second


def test_a_row_with_nan_fails_alone(backend: TorchBackend) -> None:
    prompts = random_prompts((20, 6, 40), VOCAB)
    good = [Driver(backend).generate([Sequence_(0, p)], 6)[0] for p in prompts]
    driver = Driver(backend)
    sequences = [Sequence_(i, p) for i, p in enumerate(prompts)]
    driver.step(sequences, chunk=64)
    for layer in backend._attention._pool.layers:
        layer[sequences[1].slots[2]] = float("nan")
    result = driver.step(sequences, chunk=64)
    assert list(result.errors) == [1] and result.tokens[1] == -1
    rest = [sequences[0], sequences[2]]
    driver.generate(rest, 6)
    assert [s.output for s in rest] == [good[0], good[2]]
    # slot 0 pads page tables; rubbish in it must not reach anybody either
    driver.backend._attention._pool.layers[0][[s for s in driver.slots.pages]] = float("nan")
    fresh = [s for s in rest if s.results]
    assert not driver.step(fresh, chunk=64).errors


def test_a_step_without_emitting_rows(backend: TorchBackend) -> None:
    [prompt] = random_prompts((30,), VOCAB)
    driver = Driver(backend)
    result = driver.step([Sequence_(0, prompt)], chunk=8)
    assert result.tokens.tolist() == [-1] and not result.logprobs
    assert result.tokens.dtype == np.int32
