"""`LLM` over the fake backend: answers, errors, streams that are left open, and more prompts than the queue holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.backends.fake.backend import FakeBackend
from weft.config.resolve import resolve
from weft.core.errors import EngineError, InvalidRequestError, NotFoundError, SettingsError, WeftError
from weft.core.sampling import SamplingParams
from weft.engine.core import EngineCore, EngineDead
from weft.engine.llm import LLM, Completion

NewLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
CHAT = [{"role": "user", "content": "My name is Mira."}]
BAD_TOKEN = 7


def assert_idle(llm: LLM) -> None:
    """Nobody's request is left, in the scheduler, the cache or the text worker."""
    assert llm.stats["engine"]["idle"]
    assert llm.stats["kv"]["active"] == 0
    assert llm._worker.open_requests == 0


def test_answers_come_in_the_order_of_the_prompts(new_llm: NewLLM) -> None:
    llm = new_llm()
    prompts = ["Once", "upon a time", llm.tokenizer.encode("there was")]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    for answer, prompt in zip(together, prompts, strict=True):
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert answer.prompt_tokens == len(ids)
        assert len(answer.token_ids) == 12
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.finish_reason == "length"
    assert_idle(llm)


def test_parameters_for_each_prompt(new_llm: NewLLM) -> None:
    llm = new_llm()
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(a.token_ids) for a in llm.generate(["a", "b"], params)] == [1, 5]
    with pytest.raises(InvalidRequestError):
        llm.generate(["a", "b", "c"], params)
    assert llm.generate([]) == []
    assert_idle(llm)


def test_logprobs(new_llm: NewLLM) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (answer,) = new_llm().generate([[10, 11, 12]], params)
    assert answer.logprobs is not None and [len(entry.top) for entry in answer.logprobs] == [2, 2, 2]
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 3
    assert answer.prompt_logprobs[0] is None


def test_chat_of_one_and_of_many(new_llm: NewLLM) -> None:
    llm = new_llm()
    (one,) = llm.chat(CHAT, GREEDY)
    both = llm.chat([CHAT, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert one.token_ids == both[0].token_ids
    ids = llm.tokenizer.encode_chat(CHAT)
    assert one.prompt_tokens == len(ids)
    assert one.token_ids == llm.generate([ids], GREEDY)[0].token_ids
    assert both[0].cached_tokens == len(ids) - 1


@pytest.mark.parametrize("prompt", ["Once upon", CHAT])
def test_streamed_text_equals_unstreamed_text(prompt: Any, new_llm: NewLLM) -> None:
    llm = new_llm()
    whole = llm.generate(prompt, GREEDY) if isinstance(prompt, str) else llm.chat(prompt, GREEDY)
    pieces = list(llm.stream(prompt, GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == whole[0].text
    assert_idle(llm)


def test_a_stop_string_ends_the_work(new_llm: NewLLM) -> None:
    llm = new_llm()
    (free,) = llm.generate("Once", GREEDY)
    stop = free.text[4:8]
    cut = free.text.index(stop)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True, stop=(stop,))
    (answer,) = llm.generate("Once", params)
    assert (answer.text, answer.finish_reason) == (free.text[:cut], "stop")
    assert "".join(llm.stream("Once", params)) == free.text[:cut]
    assert_idle(llm)


def test_an_error_of_one_prompt_of_many(new_llm: NewLLM) -> None:
    llm = new_llm()
    for bad in ([], [10**6], [5] * 5000, [-1]):
        with pytest.raises(InvalidRequestError):
            llm.generate(["Once", bad, "upon"], GREEDY)
        assert_idle(llm)
    assert len(llm.generate("Once", GREEDY)) == 1


def test_run_answers_what_it_can(new_llm: NewLLM) -> None:
    llm = new_llm()
    jobs: list[Any] = [("Once", GREEDY), ([], GREEDY), (CHAT, GREEDY), ([{"role": "user"}], GREEDY)]
    answers = llm.run(jobs)
    assert [isinstance(answer, Completion) for answer in answers] == [True, False, True, False]
    assert isinstance(answers[1], InvalidRequestError)
    (expected,) = llm.generate("Once", GREEDY)
    assert isinstance(answers[0], Completion) and answers[0].text == expected.text
    assert_idle(llm)


def test_a_step_that_fails_is_an_error_of_its_prompts(new_llm: NewLLM) -> None:
    llm = new_llm(f"backend.fake.faults={{raise_on_token: {BAD_TOKEN}}}")
    with pytest.raises(EngineError):
        llm.generate([[BAD_TOKEN]], GREEDY)
    assert_idle(llm)
    assert llm.generate([[5]], GREEDY)[0].finish_reason == "length"


def test_a_dead_engine_says_so_and_leaves_nothing_open(new_llm: NewLLM) -> None:
    llm = new_llm(f"backend.fake.faults={{raise_on_token: {BAD_TOKEN}}}", "scheduler.max_batch_size=1")
    with pytest.raises(EngineDead):
        llm.run([([BAD_TOKEN], GREEDY)] * 5)
    assert_idle(llm)


def test_more_prompts_than_the_queue_holds(new_llm: NewLLM) -> None:
    llm = new_llm("http.max_queue_size=2", "http.max_concurrent_requests=4")
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    prompts = [[10 + k % 7, 20 + k] for k in range(300)]
    answers = llm.generate(prompts, params)
    assert [len(answer.token_ids) for answer in answers] == [2] * 300
    assert llm.stats["requests"]["finished"]["rejected"] == 0


def test_two_streams_at_once(new_llm: NewLLM) -> None:
    llm = new_llm()
    expected = ["".join(llm.stream(prompt, GREEDY)) for prompt in ("Once", "upon")]
    texts = ["", ""]
    for pieces in zip_longest(llm.stream("Once", GREEDY), llm.stream("upon", GREEDY), fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == expected
    assert_idle(llm)


def test_other_calls_while_a_stream_is_open(new_llm: NewLLM) -> None:
    llm = new_llm()
    expected = "".join(llm.stream("Once", GREEDY))
    stream = llm.stream("Once", GREEDY)
    text = next(stream)
    assert len(llm.generate(["a", "b"], GREEDY)) == 2
    with pytest.raises(InvalidRequestError):
        llm.generate([[]], GREEDY)
    assert text + "".join(stream) == expected
    assert_idle(llm)


def test_an_abandoned_stream_is_cancelled(new_llm: NewLLM) -> None:
    llm = new_llm()
    llm.stream("Once", GREEDY)  # never begun
    stream = llm.stream("Once", GREEDY)
    next(stream)
    assert not llm.stats["engine"]["idle"]
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)
    assert llm.stats["requests"]["finished"]["cancelled"] == 1
    for _ in llm.stream("Once", GREEDY):
        break
    assert_idle(llm)


def test_errors_in_a_stream(new_llm: NewLLM) -> None:
    llm = new_llm()
    with pytest.raises(WeftError):
        next(llm.stream([], GREEDY))
    assert_idle(llm)


def test_a_seed_repeats_a_text(new_llm: NewLLM) -> None:
    llm = new_llm()
    params = SamplingParams(seed=5, max_new_tokens=8)
    first = llm.generate("Once", params)[0].text
    assert llm.generate(["upon", "Once"], params)[1].text == first


def test_closing_twice_is_fine() -> None:
    with LLM(backend="fake", settings={"kv_cache.max_items": 1024}) as llm:
        llm.generate("Once", GREEDY)
    llm.close()


def test_a_gguf_file() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from weft.backends.registry import BUNDLED_MODEL

    with LLM(str(BUNDLED_MODEL / "model-q8_0.gguf")) as llm:
        question = [{"role": "user", "content": "Count from 1 to 5."}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_new_tokens=32))[0]
        assert answer.text.startswith("1, 2, 3, 4, 5")


def test_adapters_answer_differently_and_each_on_its_own_cache(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    prompt = list(range(10, 40))
    with LLM(backend="fake", lora={"one": str(tmp_path / "a.gguf"), "two": str(tmp_path / "a.gguf")}) as llm:
        answers = [llm.generate([prompt, prompt], params, adapter=name) for name in (None, "one", "two")]
        assert len({tuple(first.token_ids) for first, _ in answers}) == 3
        assert all(first.token_ids == second.token_ids for first, second in answers)
        assert [answer.cached_tokens for pair in answers for answer in pair] == [0, 29] * 3
        assert "".join(llm.stream(prompt, params, adapter="two")) == answers[2][0].text
        chats = [llm.chat([{"role": "user", "content": "hi"}], params, adapter=name)[0].text for name in (None, "one")]
        assert chats[0] != chats[1]
        with pytest.raises(NotFoundError, match="adapter: there is no 'three'.*'one', 'two'"):
            llm.generate("Once", adapter="three")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora": {"a": "/nowhere/a.gguf"}}, "model.lora 'a': there is no file /nowhere/a.gguf"),
        ({"lora": {"weft-demo": __file__}}, "model.lora 'weft-demo': this is the name of the model itself"),
        ({"lora": {"a": __file__}, "backend": "torch"}, "model.lora: the torch engine has no LoRA adapters"),
        ({"lora": {"": __file__}}, "model.lora: .* is not allowed; allowed: mapping of name to file"),
    ],
)
def test_adapters_that_cannot_be_had_are_errors_at_the_start(given: dict[str, Any], words: str) -> None:
    if given.get("backend") == "torch":
        pytest.importorskip("torch")
    with pytest.raises(SettingsError, match=words):
        LLM(**({"backend": "fake"} | given))


def test_more_adapters_than_the_cache_has_keys_for() -> None:
    lora = {f"a{k}": __file__ for k in range(3)}
    settings = resolve(flags={"model.lora": lora}, sets=["kv_cache.max_items=64"]).settings
    core = EngineCore(settings, FakeBackend(vocab_size=700_000_000, max_context_tokens=64))
    with pytest.raises(SettingsError, match=r"model.lora: 3 adapters are too many .*\(at most 2\)"):
        core.load()


def test_embeddings(new_llm: NewLLM) -> None:
    llm = new_llm("backend.fake.embeddings=6", "http.max_queue_size=2")
    prompts = ["Once", "upon a time", llm.tokenizer.encode("there was"), "Once", *["more"] * 200]
    vectors = llm.embed(prompts)
    assert [vector.shape for vector in vectors] == [(6,)] * len(prompts)
    np.testing.assert_array_equal(vectors[0], vectors[3])
    np.testing.assert_array_equal(vectors[1], llm.embed("upon a time")[0])
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    (cut,) = llm.embed("Once", dimensions=2)
    np.testing.assert_allclose(cut, vectors[0][:2] / np.linalg.norm(vectors[0][:2]), rtol=1e-6)
    assert llm.embed([]) == []
    with pytest.raises(InvalidRequestError, match="generates no text"):
        llm.generate("Once")
    for prompt in ("Once", CHAT):
        with pytest.raises(InvalidRequestError, match=r"use LLM\.embed"):
            llm.run([(prompt, SamplingParams(embed=True))])
    assert_idle(llm)


def test_a_failing_embedding_ends_the_others(new_llm: NewLLM) -> None:
    llm = new_llm("backend.fake.embeddings=6", f"backend.fake.faults={{nan_on_token: {BAD_TOKEN}}}")
    with pytest.raises(EngineError):
        llm.embed([[1, 2], [BAD_TOKEN], [3]])
    assert_idle(llm)
    with pytest.raises(InvalidRequestError, match="dimensions: 7"):
        llm.embed("a", dimensions=7)
    with pytest.raises(InvalidRequestError, match="makes no embeddings"):
        new_llm().embed("a")
