"""The whole server on the llama.cpp engine: the lifecycle that the other engines have."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from tests.config.test_edge import EDGE
from tests.launch.worker import END_LIMIT_S, Worker
from weft.backends.registry import BUNDLED_MODEL

GGUF = str(BUNDLED_MODEL / "model-q8_0.gguf")
COUNT = {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0, "max_tokens": 24}
LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def served(*arguments: str, model: str = GGUF) -> Worker:
    return Worker(model, *arguments, backend="auto")


async def ask(url: str, bodies: list[dict[str, Any]], path: str = "/v1/chat/completions") -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=END_LIMIT_S, limits=httpx.Limits(max_connections=None)) as http:
        return list(await asyncio.gather(*(http.post(path, json=body) for body in bodies)))


def texts(answers: list[httpx.Response]) -> list[str]:
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


def assert_idle(worker: Worker) -> None:
    """Every row, cell and sequence is back: what is left holds cached branches."""
    end_s = time.monotonic() + END_LIMIT_S
    while True:
        stats = worker.stats()
        requests = stats["requests"]
        if not any(requests[state] for state in ("queued", "pending", "processing")) and not stats["kv"]["active"]:
            break
        assert time.monotonic() < end_s, stats
    worker.http.post("/flush_cache").raise_for_status()
    stats = worker.stats()
    assert stats["kv"]["free"] == stats["kv"]["capacity"] and stats["sequence_ids"]["used"] == 0


def test_in_sequence_at_once_and_a_thousand_times() -> None:
    with served() as worker:
        assert worker.stats()["engine"]["backend"] == "llama_cpp"
        (first,) = texts(asyncio.run(ask(worker.url, [COUNT])))
        assert "1, 2, 3, 4, 5" in first
        for _ in range(12):
            assert texts(asyncio.run(ask(worker.url, [COUNT]))) == [first]
        for many in (20, 64, 50, 50, 50):
            assert set(texts(asyncio.run(ask(worker.url, [COUNT] * many)))) == {first}
        short = COUNT | {"max_tokens": 2}
        (start,) = texts(asyncio.run(ask(worker.url, [short])))
        for _ in range(1000):
            answer = worker.http.post("/v1/chat/completions", json=short).json()
            assert answer["choices"][0]["message"]["content"] == start
        assert_idle(worker)


def test_ten_clients_on_two_sequences_all_end_well() -> None:
    with served("--set", "backend.llama_cpp.n_seq_max=2") as worker:
        assert worker.stats()["sequence_ids"]["total"] == 2
        assert len(set(texts(asyncio.run(ask(worker.url, [COUNT] * 10))))) == 1
        assert_idle(worker)


def test_a_timeout_frees_everything_and_the_next_request_runs_at_once() -> None:
    """Eight streams of 2,000 tokens take far longer than two seconds on any machine that this runs on."""
    with served("--set", "http.request_timeout_s=2", "--set", "http.max_concurrent_requests=8") as worker:

        async def timed() -> list[tuple[httpx.Response, float]]:
            async with httpx.AsyncClient(base_url=worker.url, timeout=END_LIMIT_S) as http:

                async def one(number: int) -> tuple[httpx.Response, float]:
                    start_s = time.monotonic()
                    body = LONG | {"prompt": f"Story {number}", "max_tokens": 2000}
                    answer = await http.post("/v1/completions", json=body)
                    return answer, time.monotonic() - start_s

                return list(await asyncio.gather(*map(one, range(8))))

        for answer, seconds in asyncio.run(timed()):
            assert answer.status_code == 408, answer.text
            assert 2.0 <= seconds < 4.0  # the deadline, found by a scan each second; and room for a busy machine
        assert_idle(worker)
        assert texts(asyncio.run(ask(worker.url, [COUNT])))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
    pytest.importorskip("torch", reason="PyTorch, which reads the bundled model's weights, is not installed")
    from tests.engine.llama import lora

    whole = lora.write_model(tmp_path / "whole.gguf")
    lora.write_model(tmp_path / "split.gguf", split_max_tensors=20)
    files = sorted(tmp_path.glob("split-*.gguf"))
    assert len(files) > 2 and gguf
    said = []
    for model in (whole, files[0]):
        with served(model=str(model)) as worker:
            said.append(texts(asyncio.run(ask(worker.url, [COUNT]))))
            assert_idle(worker)
    assert said[0] == said[1]


def test_vanished_clients_leave_nothing() -> None:
    with served() as worker:

        async def vanish() -> None:
            async with httpx.AsyncClient(base_url=worker.url, timeout=END_LIMIT_S) as http:
                for number in range(20):
                    async with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
                        lines = answer.aiter_lines()
                        for _ in range(number):
                            await anext(lines)

        asyncio.run(vanish())
        assert_idle(worker)
        assert worker.stats()["requests"]["finished"]["cancelled"] == 20


def test_edge_yaml_runs_it() -> None:
    with served("--config", str(EDGE)) as worker:
        stats = worker.stats()
        assert stats["sequence_ids"]["total"] == 8
        texts(asyncio.run(ask(worker.url, [COUNT] * 12)))
        too_long = worker.http.post("/v1/completions", json={"prompt": [20] * 129, "max_tokens": 1})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert_idle(worker)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("scheduler.max_batch_size=16", "backend.llama_cpp.n_seq_max=8"), ("16", "n_seq_max 8")),
        (("scheduler.max_prefill_tokens=1024",), ("1024", "n_batch 512")),
        (("kv_cache.page_size=16",), ("page_size 16",)),
    ],
)
def test_contradictions_are_named_at_the_start(setting: tuple[str, ...], words: tuple[str, ...]) -> None:
    arguments = [word for item in setting for word in ("--set", item)]
    worker = served(*arguments)
    try:
        assert worker.wait() == 2
        assert all(word in worker.log for word in words), worker.log
    finally:
        worker.http.close()


def test_adapters_are_models_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch, which reads the bundled model's weights, is not installed")
    from tests.engine.llama import lora

    for seed in (1, 2):
        lora.write_adapter(tmp_path / f"a{seed}.gguf", lora.adapter(seed))
    files = [f"--lora=a{seed}={tmp_path}/a{seed}.gguf" for seed in (1, 2)]
    names = ["demo", "a1", "a2"]
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 24}
    model = str(lora.write_model(tmp_path / "f32.gguf"))  # quantised, a batch's shape would blur such random adapters
    with served("--served-name", "demo", *files, model=model) as worker:
        cards = worker.http.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("demo", None), ("a1", "demo"), ("a2", "demo")]
        alone = [asyncio.run(ask(worker.url, [body | {"model": name}]))[0] for name in names]
        assert len(set(texts(alone))) == 3
        assert [answer.json()["model"] for answer in alone] == names
        assert [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in alone] == [0, 0, 0]
        again = asyncio.run(ask(worker.url, [body | {"model": name} for name in names * 2]))
        assert texts(again) == texts(alone) * 2
        assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in again)
        shown = [record["adapter"] for record in worker.http.get("/v1/requests").json()["requests"]]
        assert shown[:3] == [None, "a1", "a2"]
        assert_idle(worker)


def test_an_adapter_that_does_not_fit_ends_the_start_with_2() -> None:
    worker = served(f"--lora=mine={GGUF}")
    assert worker.wait() == 2
    assert "model.lora 'mine'" in worker.log and "general.type" in worker.log
