"""Thousands of mixed requests, a tenth of them closed mid-stream: nothing may be left, and memory must not grow."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.launch.worker import Worker

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")

REQUESTS = 2000
CONCURRENCY = 48


def _body(rng: random.Random) -> dict[str, Any]:
    """A completion of some kind: long and short, streamed and not, sharing prefixes, with and without extras."""
    body: dict[str, Any] = {
        "prompt": "The weaver said: " + "one two three " * rng.randint(0, 12) + str(rng.randint(0, 9)),
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0, 1]),
        "stream": rng.random() < 0.6,
    }
    if rng.random() < 0.2:
        body["stop"] = ["e", "the end"]
    if rng.random() < 0.1:
        body["n"] = 2
    if rng.random() < 0.1:
        body["logprobs"] = 2
    if rng.random() < 0.05:
        body["prompt"] = ""  # refused
    return body


async def _flood(url: str, seed: int, count: int) -> list[int | None]:
    """Status of each request; None for those that were closed on purpose, mid-stream."""
    rng = random.Random(seed)
    bodies = [_body(rng) for _ in range(count)]
    closed_early = [rng.random() < 0.1 for _ in range(count)]
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def one(body: dict[str, Any], early: bool) -> int | None:
            async with gate:
                if not early:
                    return (await http.post("/v1/completions", json=body)).status_code
                body = body | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_bytes():
                        break
                return None

        return await asyncio.gather(*(one(b, e) for b, e in zip(bodies, closed_early, strict=True)))


def _resident_kb(pid: int) -> int:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1])


def _wait_idle(worker: Worker) -> dict[str, Any]:
    """Requests whose client has gone end within a step; each look at the statistics waits for one."""
    for _ in range(1000):
        stats = worker.stats()
        if stats["engine"]["idle"]:
            return stats
    raise AssertionError(f"never idle: {stats}")


def test_nothing_leaks_in_a_flood() -> None:
    settings = ("--set", "kv_cache.max_items=20000", "--set", "backend.fake.tokens_per_s=40000")
    with Worker(*settings) as worker:
        pids = [worker.pid, worker.child("engine"), worker.child("text")]
        asyncio.run(_flood(worker.url, 1, REQUESTS // 2))
        _wait_idle(worker)
        before = [_resident_kb(pid) for pid in pids]
        statuses = asyncio.run(_flood(worker.url, 2, REQUESTS // 2))
        stats = _wait_idle(worker)
        after = [_resident_kb(pid) for pid in pids]

        assert set(statuses) == {200, 400, None}
        assert statuses.count(None) > REQUESTS // 40
        requests, kv = stats["requests"], stats["kv"]
        assert (requests["queued"], requests["pending"], requests["processing"]) == (0, 0, 0)
        assert kv["active"] == 0
        assert kv["free"] + kv["cached"] == kv["capacity"]
        assert stats["sequence_ids"]["used"] == 0
        assert requests["finished"]["failed"] == requests["finished"]["timeout"] == 0
        assert requests["finished"]["cancelled"] > 0
        for was, now in zip(before, after, strict=True):
            assert now - was < 6 * 1024, f"resident memory in KiB before {before}, after {after}"
        worker.http.post("/flush_cache").raise_for_status()
        assert worker.stats()["kv"]["free"] == kv["capacity"]
