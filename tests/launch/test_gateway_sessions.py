"""Sessions through `weft gateway` before two real workers with the demo model: right texts, from the cache."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.gateway.conftest import Client, user
from tests.launch.gateway import GatewayUnderTest
from tests.launch.test_gateway import until, worker_at

pytest.importorskip("torch", reason="needs the torch engine")
pytestmark = pytest.mark.slow

# float32: what is compared with other computations must not hang on rounding.
MODEL = ("--spawn", "2", "--dtype", "float32", "--set", "gateway.health_interval_s=0.5")
NO_LIMIT = ("--set", "http.request_timeout_s=null")

SESSIONS, TURNS = 200, 4


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayUnderTest]:
    with GatewayUnderTest(*MODEL, *NO_LIMIT) as running:
        yield running


@asynccontextmanager
async def session(gateway: GatewayUnderTest, name: str) -> AsyncIterator[Client]:
    async with connect(f"ws{gateway.url[4:]}/ws/streaming/{name}", compression=None, proxy=None) as ws:
        yield Client(ws)


def cold(gateway: GatewayUnderTest, messages: list[dict[str, Any]], tokens: int) -> str:
    for kept in gateway.http.get("/v1/sessions").json()["sessions"]:
        gateway.http.delete(f"/v1/sessions/{kept['id']}").raise_for_status()
    gateway.http.post("/flush_cache").raise_for_status()
    body = {"messages": messages, "temperature": 0, "max_tokens": tokens}
    answer = gateway.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return str(answer["choices"][0]["message"]["content"])


async def ask(client: Client, messages: list[dict[str, Any]], text: str, tokens: int = 40) -> dict[str, Any]:
    """A greedy turn; the answer is added to `messages`. Its route, its prefill_done and its done, in one."""
    messages.append(user(text))
    await client.send("prefill", messages=messages)
    route = (await client.next("queue_done"))["route"]
    prefilled = await client.next("prefill_done")
    answer, done = await client.answer(temperature=0, max_new_tokens=tokens)
    messages.append({"role": "assistant", "content": answer})
    return route | prefilled | done | {"text": answer}


async def test_ten_turns_over_hits_equal_cold_ones(gateway: GatewayUnderTest) -> None:
    facts = ["My name is Mira.", "What is 7 plus 5?", "Count from 1 to 5.", "hello there", "What is 30 plus 12?"]
    facts += ["What is my name?", "Tell me a story.", "Count from 3 to 9.", "thanks", "What is my name?"]
    messages: list[dict[str, Any]] = []
    held = 0
    async with session(gateway, "ten") as client:
        for number, text in enumerate(facts):
            turn = await ask(client, messages, text)
            assert turn["reason"] == ("hit" if number else "empty")
            # At least the prompt before; of the answer as much as has the same tokens when it is read as text.
            assert turn["cached_tokens"] >= held
            held = turn["token_stats"]["cached"] + turn["token_stats"]["input"]
    assert "Mira" in messages[11]["content"] and "Mira" in messages[19]["content"]
    for number in range(0, len(messages), 2):
        assert await asyncio.to_thread(cold, gateway, messages[: number + 1], 40) == messages[number + 1]["content"]


async def test_b_vanishes_on_as_worker(gateway: GatewayUnderTest) -> None:
    """With one place on each worker, B has to take one; A's next turn is as if B had never been."""
    async with session(gateway, "a") as a:
        messages: list[dict[str, Any]] = []
        await ask(a, messages, "My name is Anna.")
        for number in range(2):
            async with session(gateway, f"b{number}") as b:
                await b.prefill([user("My name is Bruno. Tell me a long story.")])
                await b.send("generate", temperature=0, max_new_tokens=200)
                await b.next("chunk")
                await b.vanish()
        turn = await ask(a, messages, "What is my name?")
        assert "Anna" in turn["text"] and "Bruno" not in turn["text"]


async def test_stop_then_the_next_turn(gateway: GatewayUnderTest) -> None:
    async with session(gateway, "stop") as client:
        messages = [user("My name is Carla. Tell me a long story.")]
        await client.prefill(messages)
        await client.send("generate", temperature=0, max_new_tokens=400)
        first = await client.next("chunk")
        await client.send("stop")
        text, done = await client.rest()
        assert done["stopped"] is True and done["finish_reason"] == "abort"
        messages.append({"role": "assistant", "content": (first["text_delta"] or "") + text})
        turn = await ask(client, messages, "What is my name?")
        assert turn["reason"] == "hit" and turn["cached_tokens"] > 0
        assert turn["text"] == await asyncio.to_thread(cold, gateway, messages[:-1], 40)


async def test_a_session_outlives_its_worker() -> None:
    """kill -9 in the middle of an answer: the same text comes from the other worker, and the next turn is right."""
    with GatewayUnderTest(*MODEL, *NO_LIMIT) as gateway:
        body = {"messages": [user("My name is Dora. Count from 1 to 40.")], "temperature": 0, "max_tokens": 120}
        expected = gateway.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        gateway.http.post("/flush_cache")
        async with session(gateway, "outlives") as client:
            messages = [user("My name is Dora. Count from 1 to 40.")]
            await client.send("prefill", messages=messages)
            name = (await client.next("queue_done"))["route"]["worker"]
            await client.next("prefill_done")
            url = next(worker["url"] for worker in gateway.workers() if worker["name"] == name)
            pid = await asyncio.to_thread(worker_at, gateway, url)
            await client.send("generate", temperature=0, max_new_tokens=120)
            text = (await client.next("chunk"))["text_delta"] or ""
            os.kill(pid, signal.SIGKILL)
            rest, done = await client.rest()
            assert text + rest == expected
            assert done["moves"] == 1
            messages.append({"role": "assistant", "content": text + rest})
            turn = await ask(client, messages, "What is my name?")
            assert turn["worker"] != name and turn["reason"] == "hit" and "Dora" in turn["text"]


async def test_many_sessions_keep_their_secrets_apart(gateway: GatewayUnderTest) -> None:
    """200 sessions of four turns at once: each recalls its own number, nearly all from the cache, and nothing stays."""
    before = gateway.http.get("/stats").json()["gateway"]["routes"]
    hits = 0

    async def talk(number: int) -> None:
        nonlocal hits
        secret = str(100 + number * 4)
        messages: list[dict[str, Any]] = []
        async with session(gateway, f"talk{number}") as client:
            for index in range(TURNS):
                text = f"My number is {secret}." if index == 0 else "What is my number?"
                turn = await asyncio.wait_for(ask(client, messages, text, 16), 600)
                if index:
                    hits += turn["reason"] == "hit" and turn["cached_tokens"] > 0
                    others = [word.strip(".,!") for word in turn["text"].split() if word.strip(".,!").isdecimal()]
                    assert set(others) <= {secret}, (secret, turn["text"])
                    told.append(secret in turn["text"])

    told: list[bool] = []
    await asyncio.gather(*(talk(number) for number in range(SESSIONS)))
    assert hits / (SESSIONS * (TURNS - 1)) > 0.95
    assert sum(told) / len(told) > 0.95  # the model recalls, wherever its turns ran
    stats = until(lambda: (s := gateway.http.get("/stats").json())["gateway"]["in_flight"] == 0 and s)
    assert stats["requests"]["queued"] == stats["requests"]["pending"] == stats["requests"]["processing"] == 0
    assert stats["kv"]["active"] == 0 and stats["gateway"]["queue_length"] == stats["gateway"]["turns"] == 0
    assert stats["gateway"]["routes"]["hit"] - before.get("hit", 0) >= hits
