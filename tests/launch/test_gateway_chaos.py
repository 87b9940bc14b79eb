"""A crowd of clients that behave badly, over HTTP and WebSockets, while workers are killed: nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.gateway.conftest import user
from tests.launch.gateway import GatewayUnderTest
from tests.launch.test_gateway import chat, until, worker_at

pytestmark = pytest.mark.slow

CLIENTS = 120
GARBAGE = [
    "{",
    "[]",
    '{"type": 7}',
    '{"type": "prefill"}',
    '{"type": "generate", "temperature": "hot"}',
    '{"type": "dance"}',
]


async def over_http(url: str, number: int, chooser: random.Random) -> None:
    """Streams or not; reads all of it, or goes away at some point; or sends what nobody can read."""
    body: Any = chat(f"client {number % 7}", chooser.randint(1, 30), stream=chooser.random() < 0.7)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        if chooser.random() < 0.1:
            answer = await client.post("/v1/chat/completions", content=b"{" * chooser.randint(1, 1000))
            assert answer.status_code in (400, 503)
            return
        leaves_after = chooser.choice([None, None, 0, 1, 5])
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code in (200, 429, 503), answer.status_code
            events = 0
            async for _ in answer.aiter_lines():
                events += 1
                if leaves_after is not None and events > leaves_after:
                    return


async def over_session(url: str, number: int, chooser: random.Random) -> None:
    """Turns that end well, are stopped, are left, are mixed with garbage; in whatever order frames come."""
    async with connect(f"ws{url[4:]}/ws/streaming/{number % 40}", proxy=None, open_timeout=60) as ws:
        messages = [user(f"client {number % 5}")]
        for _ in range(chooser.randint(1, 3)):
            frames = [{"type": "prefill", "messages": messages}, {"type": "generate", "max_new_tokens": 20}]
            await ws.send(httpx.Request("POST", url, json=frames[0]).content.decode())
            deadline = asyncio.get_running_loop().time() + chooser.choice([0.05, 0.5, 30])
            while asyncio.get_running_loop().time() < deadline:
                if chooser.random() < 0.05:
                    await ws.send(chooser.choice(GARBAGE))
                if chooser.random() < 0.03:
                    await ws.send('{"type": "stop"}')
                try:
                    text = str(await asyncio.wait_for(ws.recv(), 1))
                except TimeoutError:
                    continue
                if '"prefill_done"' in text:
                    await ws.send(httpx.Request("POST", url, json=frames[1]).content.decode())
                if '"done"' in text or chooser.random() < 0.02:
                    break
        if chooser.random() < 0.5:
            ws.transport.abort()


async def test_a_bad_crowd() -> None:
    settings = ("--set", "http.max_concurrent_requests=8", "--set", "http.max_sessions=12", "--set", "log.level=error")
    speed = ("--set", "backend.fake.tokens_per_s=2000", "--set", "gateway.health_interval_s=0.5")
    with GatewayUnderTest("--spawn", "2", "--backend", "fake", *settings, *speed) as gateway:
        chooser = random.Random(5)

        async def one(number: int) -> None:
            own = random.Random(number)
            await asyncio.sleep(own.random() * 4)
            work = over_session if number % 2 else over_http
            with contextlib.suppress(httpx.HTTPError, WebSocketException, OSError):
                await work(gateway.url, number, own)

        async def kill() -> None:
            for _ in range(2):
                await asyncio.sleep(1.3)
                url = chooser.choice(gateway.workers())["url"]
                with contextlib.suppress(AssertionError):  # it may be dead still
                    os.kill(await asyncio.to_thread(worker_at, gateway, url), signal.SIGKILL)

        await asyncio.gather(kill(), *(one(number) for number in range(CLIENTS)))

        def quiet() -> Any:
            stats = gateway.http.get("/stats").json()
            numbers = stats["gateway"]
            still = not numbers["in_flight"] and not numbers["queue_length"] and not numbers["turns"]
            return still and numbers["workers"]["idle"] == 2 and not stats["missing"] and stats

        stats = await asyncio.to_thread(until, quiet)
        assert stats["requests"]["queued"] == stats["requests"]["pending"] == stats["requests"]["processing"] == 0
        assert stats["kv"]["active"] == 0
        shown = gateway.workers()
        assert all(worker["slots"]["used"] == 0 for worker in shown)
        answer = gateway.http.post("/v1/chat/completions", json=chat("after all", 3))
        assert answer.status_code == 200
        assert "Traceback" not in gateway.log, gateway.log[-5000:]
