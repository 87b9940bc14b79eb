"""X-Session-ID and X-Session-TTL, and the endpoints that show and end sessions."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import FACTS, FakeEngineClient, silent
from weft.config.settings import KvCacheSettings, Settings
from weft.core.errors import NotFoundError
from weft.server import create_app

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_headers_reach_the_engine(http: httpx.AsyncClient, engine: FakeEngineClient, path: str) -> None:
    headers = {"X-Session-ID": "a/b~!", "X-Session-TTL": "0.5"}
    assert (await http.post(path, json=BODIES[path], headers=headers)).status_code == 200
    assert (await http.post(path, json=BODIES[path], headers={"X-Session-ID": "c"})).status_code == 200
    assert (await http.post(path, json=BODIES[path])).status_code == 200
    sent = [(request.session_id, request.session_ttl_s) for request in engine.requests]
    assert sent == [("a/b~!", 0.5), ("c", None), (None, None)]


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([("X-Session-ID", b"")], "X-Session-ID"),
        ([("X-Session-ID", b"x" * 257)], "X-Session-ID"),
        ([("X-Session-ID", b"two words")], "X-Session-ID"),
        ([("X-Session-ID", b"caf\xe9")], "X-Session-ID"),
        ([("X-Session-ID", b"a"), ("X-Session-ID", b"b")], "X-Session-ID"),
        ([("X-Session-TTL", b"60")], "X-Session-TTL"),
        *(
            ([("X-Session-ID", b"a"), ("X-Session-TTL", ttl)], "X-Session-TTL")
            for ttl in (b"", b"0", b"-1", b"86401", b"1e3", b"inf", b"nan", b"soon", b"0.0000001")
        ),
    ],
)
async def test_bad_headers_are_named(
    http: httpx.AsyncClient, engine: FakeEngineClient, headers: list[tuple[str, bytes]], param: str
) -> None:
    response = await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)
    assert engine.requests == []


@pytest.mark.parametrize("ttl", ["86400", "0.000001", "1.5"])
async def test_good_ttls(http: httpx.AsyncClient, engine: FakeEngineClient, ttl: str) -> None:
    headers = {"X-Session-ID": "x" * 256, "X-Session-TTL": ttl}
    assert (await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)).status_code == 200
    assert engine.requests[0].session_ttl_s == float(ttl)


@pytest.mark.parametrize("body", [{"prompt": "hi", "n": 2}, {"prompt": ["a", "b"]}])
async def test_a_session_is_one_conversation(http: httpx.AsyncClient, body: dict[str, object]) -> None:
    response = await http.post("/v1/completions", json=body, headers={"X-Session-ID": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Session-ID")


async def test_no_sessions_where_nothing_is_retained(engine: FakeEngineClient) -> None:
    app = create_app(engine, FACTS, Settings(kv_cache=KvCacheSettings(retain="none")))  # type: ignore[arg-type]
    status, _, body = await Call(app, "/v1/completions", {"prompt": "x"}, headers={"X-Session-ID": "a"}).answer()
    assert status == 400
    assert "kv_cache.retain" in json.loads(body)["error"]["message"]
    assert (await Call(app, "/v1/completions", {"prompt": "x"}).answer())[0] == 200


async def test_list_and_end(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.engine_answers["sessions"] = {"sessions": [{"id": "a", "tokens": 5}]}
    assert (await http.get("/v1/sessions")).json() == {"sessions": [{"id": "a", "tokens": 5}]}
    response = await http.delete("/v1/sessions/a%2Fb%3F")
    assert response.json() == {"id": "a/b?", "ended": True, "aborted": 0}
    assert engine.engine_queries[-1] == ("end_session", {"session_id": "a/b?"})
    engine.engine_answers["end_session"] = NotFoundError("no such session")
    assert (await http.delete("/v1/sessions/a")).status_code == 404


async def test_ending_a_session_ends_its_requests(app: FastAPI, engine: FakeEngineClient) -> None:
    """Also those that are still being tokenized, of which the engine knows nothing."""
    engine.behaviour = silent
    engine.engine_answers["end_session"] = NotFoundError("no such session")
    call = Call(app, "/v1/completions", {"prompt": "x"}, headers={"X-Session-ID": "a"})
    await engine.submitted.wait()
    other = Call(app, "/v1/completions", {"prompt": "x"}, headers={"X-Session-ID": "b"})
    status, _, body = await Call(app, "/v1/sessions/a", method="DELETE").answer()
    assert (status, json.loads(body)) == (200, {"id": "a", "ended": False, "aborted": 1})
    assert (await call.answer())[0] == 499
    assert engine.aborted == [1]
    other.disconnect()
    await other.done()
