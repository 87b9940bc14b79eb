"""Endings that come while a step is running: it is broken off, and the next request need not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.launch.worker import END_LIMIT_S, Worker

STEP_S = 100.0
PROMPT = [20 + k % 50 for k in range(200)]
"""At two tokens a second one step of this prompt takes `STEP_S`, far longer than any test."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("--set", "backend.fake.tokens_per_s=2", "--set", "engine.heartbeat_s=60") as worker:
        yield worker


def until_idle(worker: Worker) -> dict[str, Any]:
    end_s = time.monotonic() + END_LIMIT_S
    while time.monotonic() < end_s:
        stats = worker.stats()
        if stats["engine"]["idle"]:
            return stats
    raise AssertionError(f"still busy: {stats}")


def until_processing(worker: Worker) -> None:
    end_s = time.monotonic() + END_LIMIT_S
    while not worker.stats()["requests"]["processing"]:
        assert time.monotonic() < end_s


def send(worker: Worker, **more: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    """Sends the long prompt from another thread; its answer is in the list once the thread has ended."""
    answers: list[httpx.Response] = []
    headers = more.pop("headers", {})

    def run() -> None:
        body = {"prompt": PROMPT, "max_tokens": 5} | more
        answers.append(httpx.post(f"{worker.url}/v1/completions", json=body, headers=headers, timeout=END_LIMIT_S))

    thread = threading.Thread(target=run)
    thread.start()
    until_processing(worker)
    return thread, answers


def assert_serves_at_once(worker: Worker) -> None:
    stats = until_idle(worker)
    assert stats["kv"]["active"] == 0 and stats["sequence_ids"]["used"] == 0
    started_s = time.monotonic()
    assert worker.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200
    assert time.monotonic() - started_s < STEP_S / 2  # a bound against waiting for the step, not an expectation


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_passes_during_a_step(worker: Worker, stream: bool) -> None:
    started_s = time.monotonic()
    thread, answers = send(worker, timeout_s=1.0, stream=stream)
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (408, "timeout")
    assert time.monotonic() - started_s < STEP_S / 2
    assert_serves_at_once(worker)


def test_abort_during_a_step(worker: Worker) -> None:
    thread, answers = send(worker)
    (live,) = [r for r in worker.http.get("/v1/requests").json()["requests"] if r["state"] == "processing"]
    assert worker.http.post("/abort", json={"request_id": live["id"]}).json() == {"aborted": 1}
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (499, "cancelled")
    assert_serves_at_once(worker)
    assert worker.http.get(f"/v1/requests/{live['id']}").json()["state"] == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_vanishes_during_a_step(worker: Worker, stream: bool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{worker.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 5, "stream": stream}, timeout=1
        )
    assert_serves_at_once(worker)


def test_the_session_ends_during_a_step(worker: Worker) -> None:
    thread, answers = send(worker, headers={"X-Session-ID": "talk"})
    assert worker.http.delete("/v1/sessions/talk").status_code == 200
    thread.join()
    assert answers[0].status_code == 499
    assert_serves_at_once(worker)
    assert worker.http.get("/v1/sessions").json()["sessions"] == []


def test_others_in_the_step_are_not_disturbed(worker: Worker) -> None:
    """One of two in a step goes away: the step goes on for the other."""
    short: list[httpx.Response] = []

    def run() -> None:
        body = {"prompt": [7, 8, 9], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        short.append(httpx.post(f"{worker.url}/v1/completions", json=body, timeout=END_LIMIT_S))

    threads = [threading.Thread(target=run)]
    threads[0].start()
    until_processing(worker)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{worker.url}/v1/completions", json={"prompt": [30, 31, 32, 33], "max_tokens": 9}, timeout=1)
    threads[0].join()
    assert short[0].status_code == 200
    alone = worker.http.post(
        "/v1/completions", json={"prompt": [7, 8, 9], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    )
    assert alone.json()["choices"] == short[0].json()["choices"]
    assert_serves_at_once(worker)


def test_the_latency_is_measured(worker: Worker) -> None:
    metrics = worker.http.get("/metrics").text
    (count,) = [line.split()[1] for line in metrics.splitlines() if line.startswith("weft_abort_latency_seconds_count")]
    assert float(count) >= 4
