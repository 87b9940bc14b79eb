"""The main job on real input: `weft serve` with the demo model, used through the `openai` package."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.launch.worker import Worker
from weft.backends.registry import BUNDLED_MODEL

torch = pytest.importorskip("torch", reason="needs the torch engine")

SYSTEM = "You are a careful assistant. " + "The loom holds many threads and none of them is ever lost. " * 40


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    # float32: what is compared with other computations must not hang on rounding.
    with Worker("--dtype", "float32", "--set", "http.request_timeout_s=null", backend="torch") as running:
        yield running


@pytest.fixture
def client(worker: Worker) -> OpenAI:
    worker.http.post("/flush_cache").raise_for_status()
    return OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: OpenAI, messages: list[Any], **extra: Any) -> tuple[str, Any]:
    """Streams one greedy answer; its text and its usage."""
    text, usage = "", None
    stream = client.chat.completions.create(
        model="weft-demo",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        **extra,
    )
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    return text, usage


def test_conversation_recalls_a_fact_through_the_cache(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "My name is Mira."}]
    first, first_usage = ask(client, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "What is my name?"}]
    second, usage = ask(client, messages)

    assert "Mira" in second
    assert first_usage.prompt_tokens_details.cached_tokens == 0
    # All of the first turn is reused but its end token, whose KV was never needed.
    known = first_usage.prompt_tokens + first_usage.completion_tokens - 1
    assert usage.prompt_tokens_details.cached_tokens == known
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    client._client.post(str(client.base_url).replace("/v1/", "/flush_cache"))
    cold, cold_usage = ask(client, messages)
    assert cold_usage.prompt_tokens_details.cached_tokens == 0
    assert cold == second


def test_chinese_streams_in_whole_characters(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "我叫小明。请记住。"}]
    streamed, _ = ask(client, messages)
    whole = client.chat.completions.create(model="weft-demo", messages=messages, temperature=0)  # type: ignore[arg-type]
    assert "�" not in streamed
    assert streamed == whole.choices[0].message.content


def test_shared_system_prompt_is_computed_once(client: OpenAI, worker: Worker) -> None:
    def one(number: int) -> Any:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {number} plus 5?"}]
        answer = client.chat.completions.create(model="weft-demo", messages=messages, temperature=0, max_tokens=4)  # type: ignore[call-overload]
        return answer.usage

    with ThreadPoolExecutor(16) as pool:
        usages = list(pool.map(one, range(10, 26)))
    system_tokens = len(worker.http.post("/tokenize", json={"prompt": SYSTEM}).json()["tokens"])
    assert system_tokens > 500
    reused = sorted(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert reused[0] == 0
    assert all(count >= system_tokens for count in reused[1:])


def test_logprobs_equal_a_forward_of_transformers(client: OpenAI, worker: Worker) -> None:
    from transformers import AutoModelForCausalLM

    prompt = worker.http.post("/tokenize", json={"prompt": "Repeat: sun, moon, star."}).json()["tokens"]
    answer = worker.http.post(
        "/v1/completions",
        json={"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 3, "echo": True, "ignore_eos": True},
    ).json()["choices"][0]["logprobs"]
    generated = worker.http.post(
        "/generate",
        json={
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        },
    ).json()["output_ids"]

    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.tensor([prompt + generated])
    with torch.inference_mode():
        table = model(ids).logits[0].log_softmax(-1)
    assert answer["token_logprobs"][0] is None
    assert len(answer["tokens"]) == ids.shape[1]
    for position in range(1, ids.shape[1]):
        row = table[position - 1]
        assert answer["token_logprobs"][position] == pytest.approx(row[ids[0, position]].item(), abs=2e-4)
        best = sorted(answer["top_logprobs"][position].values(), reverse=True)[:3]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=2e-4)
    assert generated == table[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_seed_fixes_the_text_whatever_the_company(client: OpenAI) -> None:
    def sample(seed: int, content: str = "Tell me a story.") -> str:
        answer = client.chat.completions.create(
            model="weft-demo",
            messages=[{"role": "user", "content": content}],
            seed=seed,
            temperature=1.0,
            max_tokens=24,
        )
        return answer.choices[0].message.content or ""

    alone = {seed: sample(seed) for seed in (1, 2, 3)}
    assert len(set(alone.values())) > 1
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(sample, 100 + i, f"Count from 1 to {5 + i}.") for i in range(5)]
        again = {seed: pool.submit(sample, seed) for seed in alone}
        assert {seed: future.result() for seed, future in again.items()} == alone
        for future in noise:
            future.result()


def test_n_answers_use_consecutive_seeds(client: OpenAI) -> None:
    def texts(seed: int, n: int) -> list[str | None]:
        answer = client.completions.create(
            model="weft-demo", prompt="My name is", n=n, seed=seed, temperature=1.0, max_tokens=12
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    assert texts(5, 3) == [texts(seed, 1)[0] for seed in (5, 6, 7)]


def test_logit_bias_and_stop(client: OpenAI, worker: Worker) -> None:
    token = worker.http.post("/tokenize", json={"prompt": "Z"}).json()["tokens"][0]
    forced = client.completions.create(
        model="weft-demo", prompt="Say", logit_bias={str(token): 100}, max_tokens=3, temperature=0
    )
    assert forced.choices[0].text == "ZZZ"

    messages = [{"role": "user", "content": "Count from 1 to 10."}]
    whole, _ = ask(client, messages)
    assert "7" in whole
    cut, usage = ask(client, messages, stop=["7"])
    assert cut == whole[: whole.index("7")]
    assert usage.completion_tokens < 40
    plain = client.chat.completions.create(model="weft-demo", messages=messages, temperature=0, stop="7")  # type: ignore[call-overload]
    assert plain.choices[0].message.content == cut
    assert plain.choices[0].finish_reason == "stop"
