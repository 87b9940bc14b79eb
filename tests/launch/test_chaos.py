"""Crowds of clients that connect, stream, read slowly, half-close, vanish, send garbage and cancel; and processes that
are killed among them. Afterwards everything is as before."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch.chaos import (
    Crowd,
    assert_books_agree,
    assert_clean,
    cpu_s,
    processes,
    resident_bytes,
)
from tests.launch.worker import END_LIMIT_S, Worker, wait_gone
from weft.backends.registry import BUNDLED_MODEL

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")

GGUF = str(BUNDLED_MODEL / "model-q8_0.gguf")
NEEDS_LLAMA_CPP = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the torch engine")

ROUNDS = 4
GROWTH_BYTES = 12 * 2**20
"""Memory may grow so much from the second round to the last; a leak of one body or one prompt a request is more."""

IDLE_SHARE = 0.01
IDLE_WINDOW_S = 4.0
IDLE_WINDOWS = 4


def crowd_comes(worker: Worker, count: int, seed: int, **shape: int) -> Crowd:
    """A crowd has come and gone; the books agree and nothing is left."""
    before = worker.stats()["requests"]["finished"]
    crowd = Crowd(worker, seed, **shape)
    asyncio.run(crowd.run(count))
    assert_clean(worker)
    assert_books_agree(worker, crowd.book, before)
    return crowd


def test_crowds_come_and_go_and_memory_stays() -> None:
    with Worker() as worker:
        sizes: list[list[int]] = []
        for seed in range(ROUNDS):
            crowd = crowd_comes(worker, 300, seed)
            assert crowd.book.seen["completed"] > 100
            sizes.append([resident_bytes(pid) for pid in processes(worker)])
        assert all(last - second <= GROWTH_BYTES for second, last in zip(sizes[1], sizes[-1], strict=True)), sizes
        assert_idle(worker)
        metrics = worker.http.get("/metrics").text
        assert "weft_invariant_breaches_total 0.0" in metrics
        worker.terminate()
        assert worker.wait() == 0


def assert_idle(worker: Worker) -> None:
    """Doing nothing costs nothing. No process polls: one of a few windows shows it, whatever else the machine does."""
    shares: list[float] = []
    for _ in range(IDLE_WINDOWS):
        used = [cpu_s(pid) for pid in processes(worker)]
        started_s = time.monotonic()
        time.sleep(IDLE_WINDOW_S)  # a window to measure in, not a wait for something
        elapsed_s = time.monotonic() - started_s
        shares = [(cpu_s(pid) - u) / elapsed_s for pid, u in zip(processes(worker), used, strict=True)]
        if max(shares) < IDLE_SHARE:
            return
    raise AssertionError(f"shares of a core used while idle: {shares}")


@NEEDS_TORCH
def test_a_crowd_on_the_demo_model() -> None:
    with Worker(backend="torch") as worker:
        crowd = crowd_comes(worker, 60, 7, max_tokens=12)
        assert crowd.book.seen["completed"] > 20


@NEEDS_LLAMA_CPP
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_crowds_on_llama_cpp(overlap: str) -> None:
    with Worker(GGUF, "--set", f"scheduler.overlap={overlap}", backend="llama_cpp") as worker:
        for seed in (21, 22):
            crowd = crowd_comes(worker, 150, seed, max_tokens=12)
            assert crowd.book.seen["completed"] > 50
        metrics = worker.http.get("/metrics").text
        assert "weft_invariant_breaches_total 0.0" in metrics


@NEEDS_LLAMA_CPP
@pytest.mark.parametrize("host_memory_mb", [0, 64])
def test_a_tiny_pool_on_llama_cpp(host_memory_mb: int) -> None:
    """Evicted, demoted or retracted: nobody fails."""
    tiny = (f"kv_cache.host_memory_mb={host_memory_mb}", "kv_cache.max_items=400", "http.max_queue_size=400")
    settings = [word for setting in tiny for word in ("--set", setting)]
    with Worker(GGUF, *settings, backend="llama_cpp") as worker:
        crowd = crowd_comes(worker, 120, 23, max_tokens=150)
        assert crowd.book.seen["completed"] > 40
        metrics = worker.http.get("/metrics").text
        assert metric(metrics, "weft_retractions_total") > 0
        moved = [metric(metrics, f"weft_kv_{what}_tokens_total") for what in ("demoted", "restored")]
        assert all(moved) if host_memory_mb else not any(moved)


def test_overlapped_steps() -> None:
    with Worker("--set", "scheduler.overlap=true") as worker:
        crowd_comes(worker, 150, 8)


def test_a_tiny_pool_retracts_and_fails_nobody() -> None:
    tiny = ("--set", "kv_cache.max_items=400", "--set", "http.max_queue_size=400", "--set", "backend.fake.vocab=400")
    with Worker(*tiny) as worker:
        crowd = crowd_comes(worker, 200, 9, max_tokens=200)
        assert crowd.book.seen["completed"] > 60
        metrics = worker.http.get("/metrics").text
        assert metric(metrics, "weft_retractions_total") > 0
        assert metric(metrics, "weft_kv_evicted_tokens_total") > 0


def metric(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.split()[1])


def test_a_full_queue_is_a_real_429() -> None:
    full = ("--set", "http.max_queue_size=4", "--set", "http.max_concurrent_requests=2")
    with Worker(*full, "--set", "backend.fake.tokens_per_s=3000") as worker:
        crowd = crowd_comes(worker, 150, 10)
        assert crowd.book.seen["queue_full"] > 10
        assert crowd.book.seen["completed"] > 5


def test_everything_stands_still_for_a_while_and_goes_on() -> None:
    """For the processes a jump of every clock: they were stopped, time was not."""
    with Worker("--set", "backend.fake.tokens_per_s=3000", "--set", "engine.heartbeat_s=3") as worker:
        before = worker.stats()["requests"]["finished"]
        crowd = Crowd(worker, 11)

        async def stop_and_go() -> None:
            running = asyncio.create_task(crowd.run(80))
            for pids in (processes(worker), processes(worker)[1:2], processes(worker)[:1]):
                await asyncio.sleep(0.1)
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(1.0)  # shorter than a heartbeat may be missed
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            await running

        asyncio.run(stop_and_go())
        assert_clean(worker)
        assert_books_agree(worker, crowd.book, before)


@pytest.mark.parametrize(
    ("role", "backend"),
    [("engine", "fake"), ("text", "fake"), pytest.param("engine", "llama_cpp", marks=NEEDS_LLAMA_CPP)],
)
def test_a_process_is_killed_in_the_crowd(role: str, backend: str) -> None:
    """Nobody hangs: who stays sees a whole answer or an error. And the worker serves the next crowd."""
    arguments = (GGUF,) if backend == "llama_cpp" else ("--set", "backend.fake.tokens_per_s=2000")
    with Worker(*arguments, "--restart", backend=backend) as worker:
        crowd = Crowd(worker, 12, max_tokens=200)

        async def kill_amid() -> None:
            running = asyncio.create_task(crowd.run(80))
            while not crowd.book.seen["completed"]:
                await asyncio.sleep(0.01)
            os.kill(worker.child(role), signal.SIGKILL)
            await running

        asyncio.run(kill_amid())
        # 503 may be the answer to anything, until the engine is there again.
        cut = [
            words for words in crowd.book.wrong if not words.startswith(("503", "200")) and not words.endswith(" 503")
        ]
        assert not cut, cut[:5]
        assert any("engine_dead" in words for words in crowd.book.wrong)
        end_s = time.monotonic() + END_LIMIT_S
        while worker.http.get("/health").status_code != 200:
            assert time.monotonic() < end_s
        assert_clean(worker)
        crowd_comes(worker, 40, 13)


def test_the_supervisor_is_killed_in_the_crowd() -> None:
    with Worker("--set", "backend.fake.tokens_per_s=2000") as worker:
        pids = processes(worker)
        crowd = Crowd(worker, 14, max_tokens=200)

        async def kill_amid() -> None:
            running = asyncio.create_task(crowd.run(60))
            while not crowd.book.seen["completed"]:
                await asyncio.sleep(0.01)
            os.kill(worker.pid, signal.SIGKILL)
            await asyncio.gather(running, return_exceptions=True)  # connections are refused from now on

        asyncio.run(kill_amid())
        for pid in pids[1:]:
            wait_gone(pid)
