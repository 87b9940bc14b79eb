"""GET /worker, and the digests of what the engine holds."""

from __future__ import annotations

from typing import Any

import httpx
from fastapi import FastAPI

from tests.server.fakes import FakeEngineClient, ended, says
from weft.core.errors import UnavailableError
from weft.ipc.messages import End, Heartbeat
from weft.server.prefixes import MAX_DIGESTS, HeldPrefixes
from weft.server.values import Prompt
from weft.text.digests import chat_digests, text_digests


async def facts(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/worker")).raise_for_status().json()  # type: ignore[no-any-return]


def holding(tokens: int) -> Heartbeat:
    return Heartbeat("engine", held_tokens=tokens)


async def test_it_says_what_it_is(http: httpx.AsyncClient, engine: FakeEngineClient, app: FastAPI) -> None:
    engine.beat = Heartbeat("engine", queued=3, wait_s=1.5, prompt_tokens_per_s=100.0, held_tokens=50, sessions=2)
    document = await facts(http)
    assert document["boot_id"] == (await facts(http))["boot_id"] == app.state.server.boot_id
    assert document["model"] == "weft-demo" and document["backend"] == "fake"
    assert document["ready"] is True and document["draining"] is False
    assert document["requests"] == {"total": 64, "used": 0}
    assert document["sessions"] == {"total": 256, "used": 2}
    assert (document["queued"], document["wait_s"], document["prefill_tokens_per_s"]) == (3, 1.5, 100.0)
    app.state.draining = True
    assert (await facts(http))["ready"] is False and (await facts(http))["draining"] is True


async def test_a_dead_engine_is_not_ready(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.failure = UnavailableError("dead")
    assert (await facts(http))["ready"] is False


async def test_it_tells_the_prompts_that_it_computed(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.beat = Heartbeat("engine", held_tokens=1000)
    engine.behaviour = says("a", end=ended(prompt_tokens=10))
    messages = [{"role": "user", "content": "x" * 20}]
    body = {"messages": messages}
    await http.post("/v1/chat/completions", json=body)
    assert (await facts(http))["prefixes"] == []  # nobody had asked before
    await http.post("/v1/chat/completions", json=body)
    await http.post("/v1/completions", json={"prompt": "y" * 600})
    document = await facts(http)
    expected = [digest for digest, _ in (*chat_digests(messages), *text_digests("y" * 600))]
    assert document["prefixes"] == expected[::-1]
    assert 0 < document["tokens_per_char"] <= 0.5
    await http.post("/flush_cache")
    assert (await facts(http))["prefixes"] == []


def test_only_as_much_as_the_engine_holds_is_told() -> None:
    held = HeldPrefixes()
    held.report(holding(0))
    for number in range(10):
        held.note(Prompt(text=f"{number}" * 512), "", ended(prompt_tokens=100), holding(0))
    newest = [text_digests(f"{number}" * 512)[0][0] for number in (9, 8, 7)]
    assert held.report(holding(350)) == newest
    version = held.version
    assert held.report(holding(350)) == newest and held.version == version
    held.note(Prompt(text="7" * 512), "", ended(prompt_tokens=100), holding(0))  # used again: the newest
    assert held.report(holding(350))[0] == newest[2]
    assert held.report(holding(99)) == []


async def test_a_prompt_newer_than_the_heartbeat_is_told_and_kept(
    http: httpx.AsyncClient, engine: FakeEngineClient
) -> None:
    engine.behaviour = says("a", end=ended(prompt_tokens=10))
    await facts(http)
    await http.post("/v1/completions", json={"prompt": "y" * 512})
    expected = [digest for digest, _ in text_digests("y" * 512)]
    assert (await facts(http))["prefixes"] == expected  # the last heartbeat knew of no tokens
    engine.beat = holding(12)
    assert (await facts(http))["prefixes"] == expected
    engine.beat = holding(0)  # evicted
    assert (await facts(http))["prefixes"] == []


def test_a_prompt_that_was_not_computed_is_not_told() -> None:
    held = HeldPrefixes()
    held.report(holding(0))
    held.note(Prompt(text="a" * 512), "", End("timeout", prompt_tokens=100), holding(1000))  # in the queue
    assert held.report(holding(1000)) == []
    cancelled = End("cancelled", prompt_tokens=100, completion_tokens=3, decode_s=0.1)
    held.note(Prompt(text="a" * 512), "", cancelled, holding(1000))
    assert held.report(holding(1000)) == [text_digests("a" * 512)[0][0]]


def test_the_number_of_digests_is_bounded() -> None:
    held = HeldPrefixes()
    held.report(holding(0))
    for number in range(3 * MAX_DIGESTS):
        held.note(Prompt(text=str(number)), "", ended(prompt_tokens=1), holding(0))
    assert len(held.report(holding(10**9))) == MAX_DIGESTS
