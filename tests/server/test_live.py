"""GET /v1/requests: the engine's words, and what is still being tokenized."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import FakeEngineClient, silent

KNOWN: dict[str, Any] = {"id": 2, "state": "processing", "prompt_tokens": 5}


async def document(app: FastAPI, path: str) -> tuple[int, Any]:
    status, _, body = await Call(app, path, method="GET").answer()
    return status, json.loads(body)


async def test_what_the_engine_does_not_know_yet_is_queued(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app, "/v1/completions", {"prompt": "x", "n": 2, "priority": 4})
    await engine.submitted.wait()
    ended = {"id": 99, "state": "completed"}
    engine.engine_answers["requests"] = {"requests": [ended, KNOWN]}
    status, answer = await document(app, "/v1/requests")
    assert status == 200
    first, second, third = answer["requests"]
    assert (first["id"], first["state"], first["prompt_tokens"], first["priority"]) == (1, "queued", 0, 4)
    assert first["times"]["queued_s"] == first["age_s"] >= 0
    assert (second, third) == (KNOWN, ended)
    status, one = await document(app, "/v1/requests/cmpl-1")
    assert (status, one["state"]) == (200, "queued")
    call.disconnect()
    await call.done()
    engine.engine_answers["requests"] = {"requests": []}
    assert (await document(app, "/v1/requests"))[1] == {"requests": []}
    assert (await document(app, "/v1/requests/1"))[0] == 404


@pytest.mark.parametrize("name", ["2", "chatcmpl-2"])
async def test_one_request(http: httpx.AsyncClient, engine: FakeEngineClient, name: str) -> None:
    engine.engine_answers["request"] = KNOWN
    assert (await http.get(f"/v1/requests/{name}")).json() == KNOWN
    assert engine.engine_queries[-1] == ("request", {"request_id": 2})


async def test_unknown_and_malformed(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/requests/7")).status_code == 404
    response = await http.get("/v1/requests/seven")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


async def test_the_cache_is_the_engines_word(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    assert (await http.get("/v1/cache")).json() == engine.engine_answers["cache"]
    assert engine.engine_queries[-1] == ("cache", {})
