"""Greedy output through every path of the cache equals what llama.cpp says alone. Rows one at a time, so that the
shape of a batch does not blur it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from tests.engine.llama.rig import Rig, alone, chat, output, tokenizer
from weft.backends.steps import StepCancelled
from weft.core.request import RequestState

NAME = ("My name is Mira.", "Nice to meet you, Mira!", "What is my name?")
SYSTEM = "Please remember this list: apple, river, stone, cloud, lamp. " * 8


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_cold_continued_and_repeated(rig: Rig) -> None:
    assert rig.say(chat(NAME[0])) == alone(chat(NAME[0]))
    request = rig.add(chat(*NAME))
    rig.run()
    assert request.reused_tokens >= 14
    assert output(request) == alone(chat(*NAME))
    assert "Mira" in tokenizer().decode(output(request))
    assert rig.say(chat(*NAME)) == output(request)


def test_branches_and_truncated_prefixes(rig: Rig) -> None:
    questions = ["Count from 1 to 5.", "What is 2 + 3?", "Say hello."]
    for question in questions:
        request = rig.add(chat(SYSTEM + question))
        rig.run()
        assert output(request) == alone(chat(SYSTEM + question))
    assert request.reused_tokens > 100
    cut = chat(SYSTEM + questions[0])[:60]
    assert rig.say(cut, ignore_eos=True) == alone(cut) or rig.say(cut) == alone(cut)


def test_evicted_and_computed_again() -> None:
    rig = Rig(capacity=400)
    prompts = [chat(f"{name} says: {SYSTEM}") for name in ("Ada", "Ben", "Cleo", "Dora")]
    for _ in range(2):
        for prompt in prompts:
            assert rig.say(prompt) == alone(prompt)
    assert rig.cache.evicted_total > 0
    rig.close()


def test_one_sequence_is_enough() -> None:
    rig = Rig(sequences=1)
    first = rig.add(chat(NAME[0]))
    second = rig.add(chat("Count from 1 to 5."))
    rig.run()
    assert output(first) == alone(chat(NAME[0])) and output(second) == alone(chat("Count from 1 to 5."))
    rig.close()


def test_retracted_and_resumed() -> None:
    prompts = [chat(f"Count from 1 to {n}.") for n in (7, 8, 9, 6)]
    rig = Rig(capacity=160, max_batch_size=4)
    rig.scheduler._ratio.value = 0.0
    requests = [rig.add(prompt, new=100, ignore_eos=True) for prompt in prompts]
    rig.run()
    assert sum(request.retractions for request in requests) > 0
    roomy = Rig()
    assert [output(r) for r in requests] == [roomy.say(p, new=100, ignore_eos=True) for p in prompts]
    roomy.close()
    rig.close()


def test_many_at_once_on_two_sequences() -> None:
    rig = Rig(sequences=2)
    prompt = chat("What is 2 + 3?")
    requests = [rig.add(prompt) for _ in range(10)]
    rig.run()
    assert all(request.state is RequestState.COMPLETED for request in requests)
    assert {tuple(output(request)) for request in requests} == {tuple(alone(prompt))}
    rig.close()


def test_retain_none_leaves_nothing() -> None:
    rig = Rig(retain="none")
    rig.say(chat(NAME[0]))
    assert rig.cache.counts().free == rig.cache.capacity
    assert not any(rig.backend._lengths)
    rig.close()


def test_a_broken_off_step_is_done_again(rig: Rig) -> None:
    prompt = chat(SYSTEM + "Say hello.")
    request = rig.add(prompt)
    plan = rig.scheduler.plan()
    assert plan is not None
    rig.backend.cancel(plan.step)
    with pytest.raises(StepCancelled):
        rig.backend.forward(plan)
    rig.scheduler.cancelled(plan)
    rig.run()
    assert output(request) == alone(prompt)


def test_seeded_draws_do_not_depend_on_company(rig: Rig) -> None:
    prompt = chat("Tell me a story.")
    lone = rig.say(prompt, temperature=0.8, seed=5)
    request = rig.add(prompt, temperature=0.8, seed=5)
    for seed in range(3):
        rig.add(chat(f"Count from 1 to {seed + 3}."), temperature=1.0, seed=seed)
    rig.run()
    assert output(request)[:4] == lone[:4]


def test_log_probabilities(rig: Rig) -> None:
    request = rig.add(chat("Say hello."), new=3, logprobs=5, prompt_logprobs=2)
    seen = []
    while rig.scheduler.has_work:
        plan = rig.scheduler.plan()
        assert plan is not None
        result = rig.backend.forward(plan)
        seen += list(result.logprobs.values())
        if result.prompt_logprobs:
            assert len(result.prompt_logprobs[0]) == request.input_len - 1
        rig.scheduler.apply(plan, result)
        rig.scheduler.take_updates()
    assert [entry.token_id for entry in seen] == output(request)
    assert all(len(entry.top_ids) == 5 and entry.top_ids[0] == entry.token_id for entry in seen)
