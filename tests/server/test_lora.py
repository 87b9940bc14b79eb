"""A LoRA adapter is a model to clients: listed under its parent, called by its name, named in the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import FACTS, FakeEngineClient, settings, silent
from weft.config.settings import ModelSettings
from weft.server import create_app

ADAPTERS = {"coder": "/adapters/coder-v2.gguf", "org/poet": "poet.gguf"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"})]


@pytest.fixture
def app(engine: FakeEngineClient) -> FastAPI:
    """In place of conftest's: with two adapters."""
    served = msgspec.structs.replace(settings(), model=ModelSettings(lora=ADAPTERS))
    return create_app(engine, FACTS, served)  # type: ignore[arg-type]


async def test_models_are_the_base_and_its_adapters(http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("weft-demo", "weft-demo", None),
        ("coder", "coder-v2.gguf", "weft-demo"),
        ("org/poet", "poet.gguf", "weft-demo"),
    ]
    assert (await http.get("/v1/models/org/poet")).json() == cards[2]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_the_model_chooses_the_adapter(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, body: dict[str, Any]
) -> None:
    for name in (None, "weft-demo", "coder", "org/poet"):
        response = await http.post(path, json=body if name is None else body | {"model": name})
        assert response.status_code == 200
    assert [request.adapter for request in engine.requests] == [0, 0, 1, 2]


@pytest.mark.parametrize(("path", "body"), PATHS[:2])
async def test_answers_carry_the_name_that_was_called_for(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for name, shown in ((None, "weft-demo"), ("weft-demo", "weft-demo"), ("coder", "coder")):
        asked = body if name is None else body | {"model": name}
        assert (await http.post(path, json=asked)).json()["model"] == shown
        stream = (await http.post(path, json=asked | {"stream": True})).text
        chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert {chunk["model"] for chunk in chunks} == {shown}


@pytest.mark.parametrize(("path", "body"), [*PATHS, ("/tokenize", {"prompt": "x"})])
async def test_any_other_name_is_unknown(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await http.post(path, json=body | {"model": "painter"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'weft-demo', 'coder', 'org/poet'" in error["message"]


async def test_an_adapter_has_the_models_tokens(http: httpx.AsyncClient) -> None:
    assert (await http.post("/tokenize", json={"prompt": "x", "model": "coder"})).status_code == 200


async def test_requests_show_the_adapter_before_the_engine_knows_them(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    calls = []
    for name in ("coder", "weft-demo"):
        engine.submitted.clear()
        calls.append(Call(app, "/v1/completions", {"prompt": "x", "model": name}))
        await engine.submitted.wait()
    _, _, body = await Call(app, "/v1/requests", method="GET").answer()
    assert [record["adapter"] for record in json.loads(body)["requests"]] == ["coder", None]
    for call in calls:
        call.disconnect()
        await call.done()
