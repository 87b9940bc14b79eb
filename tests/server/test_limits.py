"""What is settled before an endpoint runs: ids, keys, body sizes; errors in one form; and the gate for draining."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.driver import PATIENCE_S, Call
from tests.server.fakes import FACTS, FakeEngineClient, ended, settings, silent
from weft.core.errors import EngineError
from weft.server import create_app
from weft.web import edge
from weft.web.edge import Gate

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def small(engine: FakeEngineClient) -> FastAPI:
    """An app that takes bodies of up to 1 KiB."""
    return create_app(engine, FACTS, settings(max_body_bytes=1024))  # type: ignore[arg-type]


async def test_a_body_over_the_limit_is_refused_before_it_is_read(
    small: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "LINGER_S", 0.0)
    call = Call(small, CHAT, chunks=[b"x"] * 1000, headers={"Content-Length": "40000000"})
    status, headers, body = await call.answer()
    assert status == 413
    assert "40000000" in json.loads(body)["error"]["message"]
    assert "1024" in json.loads(body)["error"]["message"]
    assert headers["connection"] == "close"
    assert headers["x-request-id"] == "1"


async def test_a_chunked_body_over_the_limit_is_refused_as_soon_as_it_passes(
    small: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "LINGER_S", 0.0)
    call = Call(small, CHAT, chunks=[b"x" * 500] * 1000)
    status, headers, body = await call.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["error"]["code"] == "body_too_large"
    assert call.received_chunks < 10


async def test_the_answer_to_a_refused_body_comes_before_its_rest_is_dropped(small: FastAPI) -> None:
    call = Call(small, CHAT, chunks=[b"x" * 2000], then_hang=True)
    assert (await call.next())["status"] == 413
    assert b"body_too_large" in await call.next_data()
    assert not call.task.done()
    call.disconnect()
    await call.done()


async def test_a_body_at_the_limit_is_read(small: FastAPI) -> None:
    body = json.dumps(GOOD).encode().ljust(1024)
    assert (await Call(small, CHAT, chunks=[body]).answer())[0] == 200
    chunks = [body[:1000], body[1000:]]
    assert (await Call(small, CHAT, chunks=chunks, headers={"Content-Length": "1024"}).answer())[0] == 200


async def test_a_large_body_is_parsed(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
    assert (await http.post(CHAT, json=body)).status_code == 200
    assert len(engine.requests[0].messages[0]["content"]) == 1_000_000  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Basic second", 401),
        ("second", 401),
        ("Bearer s\u00e9cond", 401),
        ("Bearer first", 200),
        ("bearer second", 200),
    ],
)
async def test_keys(engine: FakeEngineClient, given: str | None, status: int) -> None:
    app = create_app(engine, FACTS, settings(api_keys=("first", "second")))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
        headers = {} if given is None else {"Authorization": given.encode()}
        response = await http.post(CHAT, json=GOOD, headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "first" not in response.text
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/stats")).status_code == 401


async def test_every_answer_has_its_id(http: httpx.AsyncClient) -> None:
    answers = [
        await http.get("/health"),
        await http.get("/nowhere"),
        await http.get(CHAT),
        await http.post(CHAT, content=b"{"),
        await http.post(CHAT, json=GOOD),
    ]
    assert [answer.status_code for answer in answers] == [200, 404, 405, 400, 200]
    assert [answer.headers["x-request-id"] for answer in answers] == ["1", "2", "3", "4", "5"]
    assert answers[-1].json()["id"] == "chatcmpl-5"


async def test_unknown_paths_and_methods_have_the_same_form(http: httpx.AsyncClient) -> None:
    missing, wrong = await http.get("/nowhere"), await http.delete(CHAT)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    for response in (missing, wrong):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    response = await http.post("/v1/audio/speech", json={})
    assert response.status_code == 404
    assert "weft[speech]" in response.json()["error"]["message"]
    assert (await http.get("/docs")).status_code == 404


async def test_a_bug_is_a_500_and_the_server_goes_on(
    http: httpx.AsyncClient, engine: FakeEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(client: FakeEngineClient, request: Any) -> None:
        raise ZeroDivisionError("secret detail")

    engine.behaviour, good = broken, engine.behaviour
    response = await http.post(CHAT, json=GOOD)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "secret" not in response.text
    assert "secret detail" in caplog.text
    engine.behaviour = good
    assert (await http.post(CHAT, json=GOOD)).status_code == 200


async def test_a_dead_engine_is_503(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.failure = EngineError("it crashed")
    response = await http.post(CHAT, json=GOOD)
    assert response.status_code == 503
    assert "it crashed" in response.json()["error"]["message"]


async def test_draining(app: FastAPI, http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app, CHAT, GOOD | {"stream": True})
    await engine.submitted.wait()
    app.state.draining = True
    for path, body in ((CHAT, GOOD), ("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"})):
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200
    idle = asyncio.ensure_future(app.state.gate.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    engine.deliver(1, "done", end=ended())
    assert (await call.answer())[0] == 200  # what runs is finished
    await asyncio.wait_for(idle, PATIENCE_S)


async def test_the_gate_counts() -> None:
    gate = Gate()
    await gate.wait_idle()
    with gate:
        with gate:
            assert gate.open == 2
        waiting = asyncio.ensure_future(gate.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, PATIENCE_S)
