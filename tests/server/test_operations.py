"""/health, /ready, /stats, /flush_cache, /abort, /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import FakeEngineClient, silent
from weft.core.errors import EngineError, InvalidRequestError
from weft.server import health

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}


async def test_health_and_ready(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready"):
        response = await http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("role", ["engine", "text0"])
async def test_a_silent_process_is_not_healthy(http: httpx.AsyncClient, engine: FakeEngineClient, role: str) -> None:
    engine.last_heartbeat_s[role] -= 11
    for path in ("/health", "/ready"):
        response = await http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_silent")
        assert role in response.json()["error"]["message"]


async def test_a_dead_engine_is_not_healthy(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.failure = EngineError("it crashed")
    for path in ("/health", "/ready"):
        response = await http.get(path)
        assert response.status_code == 503
        assert "it crashed" in response.json()["error"]["message"]


async def test_a_full_queue_is_not_ready(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.engine_answers["stats"] = {"requests": {"queued": 256}}
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200


async def test_an_engine_in_a_long_step_is_ready_but_has_no_stats(
    http: httpx.AsyncClient, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "QUERY_LIMIT_S", 0.0)
    engine.engine_answers["stats"] = None
    assert (await http.get("/ready")).status_code == 200
    response = await http.get("/stats")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_busy")


async def test_flush_cache_passes_on_the_engines_words(http: httpx.AsyncClient) -> None:
    assert (await http.post("/flush_cache")).json() == {"flushed_tokens": 7}


async def test_models(http: httpx.AsyncClient) -> None:
    card = {"id": "weft-demo", "object": "model", "created": 1700000000, "owned_by": "weft"}
    card |= {"root": "weft-demo", "parent": None, "max_model_len": 64}
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": [card]}
    assert (await http.get("/v1/models/weft-demo")).json() == card
    response = await http.get("/v1/models/org/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("request_id", [1, "1", "chatcmpl-1"])
async def test_abort_one(app: FastAPI, engine: FakeEngineClient, request_id: Any) -> None:
    engine.behaviour = silent
    call = Call(app, CHAT, GOOD | {"n": 2})
    await engine.submitted.wait()
    status, _, body = await Call(app, "/abort", {"request_id": request_id}).answer()
    assert (status, json.loads(body)) == (200, {"aborted": 2})
    status, _, body = await call.answer()
    assert (status, json.loads(body)["error"]["code"]) == (499, "cancelled")
    assert engine.open_requests == 0


async def test_abort_in_a_stream_is_an_error_event(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app, CHAT, GOOD | {"stream": True})
    await engine.submitted.wait()
    engine.deliver(1, "He")
    await call.next()
    await call.next_data()
    await Call(app, "/abort", {"request_id": 1}).answer()
    assert b'"code":"cancelled"' in await call.next_data()


async def test_abort_one_of_several_prompts(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app, "/generate", {"text": ["a", "b"]})
    await engine.submitted.wait()
    await Call(app, "/abort", {"request_id": "gen-2"}).answer()
    assert engine.aborted == [2]
    assert (await call.answer())[0] == 499


async def test_abort_all_and_unknown(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app, CHAT, GOOD | {"n": 2})
    await engine.submitted.wait()
    assert (await Call(app, "/abort", {"request_id": 999}).answer())[0] == 404
    assert json.loads((await Call(app, "/abort", {"all": True}).answer())[2]) == {"aborted": 2}
    assert (await call.answer())[0] == 499
    assert json.loads((await Call(app, "/abort", {"all": True}).answer())[2]) == {"aborted": 0}


async def test_tokenize(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    response = await http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})
    assert response.json() == {"count": 2, "max_model_len": 64, "tokens": [1, 2]}
    assert (engine.queries[0].text, engine.queries[0].add_special_tokens) == ("ab", False)
    response = await http.post("/tokenize", json={"text": "", "return_token_strs": True})
    assert response.json()["token_strs"] == ["a", "b"]
    await http.post("/tokenize", json={**GOOD, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}})
    assert engine.queries[2].messages == GOOD["messages"]
    assert engine.queries[2].template_kwargs == {"a": 1, "add_generation_prompt": False}


async def test_detokenize(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    assert (await http.post("/detokenize", json={"tokens": [1, 2]})).json() == {"prompt": "ab", "text": "ab"}
    assert engine.queries[0].token_ids == [1, 2]


async def test_the_text_process_may_refuse(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.text_answer = InvalidRequestError("no chat template", param="messages")
    response = await http.post("/tokenize", json=GOOD)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def test_openapi_describes_the_bodies(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].removeprefix("#/components/schemas/")
    assert "temperature" in document["components"]["schemas"][name]["properties"]
    text = json.dumps(document)
    for piece in text.split('"$ref": "#/components/schemas/')[1:]:
        assert piece.partition('"')[0] in document["components"]["schemas"]
