"""`weft serve` with an embedding model: the `openai` package, and the lifecycle that every other request has."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, InternalServerError, OpenAI

from tests.launch.worker import END_LIMIT_S, Worker

SLOW = ("--set", "backend.fake.embeddings=8", "--set", "backend.fake.tokens_per_s=50")
LONG = b'{"input": [%b]}' % b",".join([b"7"] * 2000)  # 40 s for the slow one


def until(worker: Worker, holds: Callable[[dict[str, Any]], bool]) -> None:
    end_s = time.monotonic() + END_LIMIT_S
    while not holds(stats := worker.stats()):
        assert time.monotonic() < end_s, stats


def idle(stats: dict[str, Any]) -> bool:
    requests = stats["requests"]
    return not any(requests[name] for name in ("queued", "pending", "processing")) and not stats["kv"]["active"]


# ---- a GGUF file -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from tests.backends.tiny_embedders import write_bert

    return write_bert(tmp_path_factory.mktemp("bert") / "tiny-bert.gguf", "mean")


@pytest.fixture(scope="module")
def worker(bert: Any) -> Iterator[Worker]:
    with Worker(str(bert.path), "--set", "http.max_queue_size=16", backend="auto") as running:
        yield running


@pytest.fixture
def client(worker: Worker) -> OpenAI:
    return OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=END_LIMIT_S)


def tokens(worker: Worker, text: str) -> list[int]:
    ids: list[int] = worker.http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    return ids


def test_the_openai_package(bert: Any, worker: Worker, client: OpenAI) -> None:
    texts = ["the cat sat on the mat.", "hello world", "dogs running?"]
    packed = client.embeddings.create(model="tiny-bert", input=texts)  # in base64, as the package asks for
    plain = client.embeddings.create(model="tiny-bert", input=texts, encoding_format="float")
    for answer in (packed, plain):
        assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == "tiny-bert"
        for text, item in zip(texts, answer.data, strict=True):
            np.testing.assert_allclose(item.embedding, bert.vector(tokens(worker, text)), atol=2e-3)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(len(tokens(worker, t)) for t in texts)
    short = client.embeddings.create(model="tiny-bert", input=texts[0], dimensions=4).data[0].embedding
    head = np.array(plain.data[0].embedding[:4])
    np.testing.assert_allclose(short, head / np.linalg.norm(head), atol=1e-5)
    assert [model.id for model in client.models.list()] == ["tiny-bert"]


def test_many_inputs_and_many_clients(worker: Worker) -> None:
    texts = [f"{word} {number}" for word in ("cat", "dog") for number in range(500)]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=worker.url, timeout=END_LIMIT_S) as http:
            many = [http.post("/v1/embeddings", json={"input": texts})]
            few = [http.post("/v1/embeddings", json={"input": text}) for text in texts[:20]]
            return list(await asyncio.gather(*many, *few))

    many, *few = asyncio.run(ask())
    vectors = [item["embedding"] for item in many.raise_for_status().json()["data"]]
    assert len(vectors) == 1000
    for vector, answer in zip(vectors, few, strict=False):
        (item,) = answer.raise_for_status().json()["data"]
        np.testing.assert_allclose(item["embedding"], vector, atol=1e-3)
    until(worker, idle)
    assert worker.stats()["engine"]["steps"] < 1020  # several texts a step


def test_errors(worker: Worker, client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"input\[1\]: it has 402 tokens, but at most 300 are allowed") as caught:
        client.embeddings.create(model="tiny-bert", input=["hello", "x " * 400])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    with pytest.raises(InternalServerError, match=r"input\[1\]: the model's embedding .* not finite"):
        client.embeddings.create(model="tiny-bert", input=["hello", "the poison", "cat"])
    with pytest.raises(BadRequestError, match="dimensions: 33 is not allowed .*1 to 32"):
        client.embeddings.create(model="tiny-bert", input="hello", dimensions=33)
    with pytest.raises(BadRequestError, match="use POST /v1/embeddings"):
        client.chat.completions.create(model="tiny-bert", messages=[{"role": "user", "content": "hi"}])
    assert len(client.embeddings.create(model="tiny-bert", input="hello").data) == 1
    until(worker, idle)


def test_what_is_told_about_it(worker: Worker) -> None:
    answer = worker.http.post("/v1/embeddings", json={"input": "hello world"})
    record = worker.http.get(f"/v1/requests/{answer.headers['x-request-id']}").raise_for_status().json()
    assert (record["state"], record["finish_reason"], record["prompt_tokens"]) == ("completed", "stop", 4)
    assert (record["output_tokens"], record["cached_tokens"], record["chunks"]) == (0, 0, 1)
    assert worker.stats()["engine"]["backend"] == "llama_cpp" and worker.stats()["kv"]["cached"] == 0
    metrics = worker.http.get("/metrics").text
    assert "weft_generation_tokens_total 0.0" in metrics and 'weft_step_time_seconds_count{mode="extend"}' in metrics


def test_a_reranker_is_refused(bert: Any, tmp_path: Path) -> None:
    from tests.backends.tiny_embedders import write_bert

    worker = Worker(str(write_bert(tmp_path / "reranker.gguf", "rank").path), backend="auto")
    try:
        assert worker.wait() == 2 and "reranker.gguf: a reranker" in worker.log, worker.log
    finally:
        worker.http.close()


# ---- the lifecycle, on an engine that is slow on purpose ----------------------------------------------------------


def test_vanished_clients_deadlines_and_aborts() -> None:
    with Worker(*SLOW) as worker:
        port = int(worker.url.rpartition(":")[2])
        for number in range(1, 4):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                head = b"POST /v1/embeddings HTTP/1.1\r\nHost: weft\r\nContent-Length: %d\r\n\r\n" % len(LONG)
                connection.sendall(head + LONG)
                until(worker, lambda stats: stats["requests"]["processing"] == 1)
            until(worker, lambda stats, n=number: stats["requests"]["finished"]["cancelled"] == n)  # type: ignore[misc]
        late = worker.http.post("/v1/embeddings", json={"input": [[7] * 2000, [8]], "timeout_s": 0.5})
        assert late.status_code == 408 and "deadline" in late.json()["error"]["message"]

        async def abort() -> httpx.Response:
            async with httpx.AsyncClient(base_url=worker.url, timeout=END_LIMIT_S) as http:
                asked = asyncio.ensure_future(http.post("/v1/embeddings", content=LONG))
                while (await http.get("/stats")).json()["requests"]["processing"] != 1:
                    pass
                assert (await http.post("/abort", json={"all": True})).json() == {"aborted": 1}
                return await asked

        assert asyncio.run(abort()).status_code == 499
        until(worker, idle)
        assert worker.http.post("/v1/embeddings", json={"input": [7]}).status_code == 200
        worker.terminate()
        assert worker.wait() == 0
