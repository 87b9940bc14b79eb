"""What gateways ask for: their ids and seeds, the token ids of streams, and answers that have begun elsewhere."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import FakeEngineClient, embeds, ended, failed, logprob, says, silent
from weft.gateway.events import EventReader
from weft.server.gateways import tokens_line

HEADER = {"X-Weft-Gateway": "id=700, seed=123"}
RESUME = {"token_ids": [100, 101], "chars": None, "created": 1600000000}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 8}},
}
every_path = pytest.mark.parametrize("path", BODIES)


def with_seed(path: str, seed: int) -> dict[str, Any]:
    if path == "/generate":
        return {"text": "hi", "sampling_params": {"seed": seed}}
    return BODIES[path] | {"seed": seed}


async def opened(app: FastAPI, engine: FakeEngineClient, path: str, **fields: Any) -> Call:
    """A stream for a gateway whose request waits for the test to deliver."""
    engine.behaviour = silent
    call = Call(app, path, BODIES[path] | {"stream": True} | fields, headers=HEADER)
    await engine.submitted.wait()
    return call


def text_of(event: bytes) -> str:
    """The new text of an event's data line."""
    document = json.loads(event[event.index(b"data: ") + 6 :])
    if "choices" not in document:
        return str(document["text"])
    (choice,) = document["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


# ---- ids and seeds ------------------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("stream", [True, False])
async def test_the_gateways_id_is_shown(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, stream: bool
) -> None:
    response = await http.post(path, json=BODIES[path] | {"stream": stream}, headers=HEADER)
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "700"
    assert response.headers["x-weft-worker-request-id"] == "1"
    assert engine.requests[0].request_ids == [1]
    ids = {word for word in response.text.replace('"', " ").split() if word.endswith("-700")}
    assert len(ids) == 1


async def test_several_prompts_show_the_gateways_id_too(http: httpx.AsyncClient) -> None:
    response = await http.post("/generate", json={"text": ["a", "b"]}, headers=HEADER)
    assert [answer["meta_info"]["id"] for answer in response.json()] == ["gen-700"] * 2


@every_path
async def test_without_a_gateway_nothing_of_it_is_shown(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json=BODIES[path] | {"stream": True})
    assert response.headers["x-request-id"] == "1"
    assert "x-weft-worker-request-id" not in response.headers
    assert ": tokens" not in response.text


@every_path
async def test_an_error_shows_the_gateways_id(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json={"nonsense": 1}, headers=HEADER)
    assert response.status_code == 400
    assert response.headers["x-request-id"] == "700"


@every_path
@pytest.mark.parametrize(
    ("header", "own", "seed"),
    [("id=7, seed=123", None, 123), ("id=7,seed=0", None, 0), ("id=7, seed=123", 5, 5), ("id=7", None, None)],
)
async def test_its_seed_counts_where_the_body_has_none(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, header: str, own: int | None, seed: int | None
) -> None:
    body = BODIES[path] if own is None else with_seed(path, own)
    await http.post(path, json=body, headers={"X-Weft-Gateway": header})
    assert engine.requests[0].params.seed == seed


MALFORMED = ["", "17", "id=", "id=-1", "id=x", "id=1;seed=2", "seed=2", "id=1, seed=", "id=1, seed=-2", "id=1, more=2"]
MALFORMED += ["id=1, seed=2, ", "id=" + "9" * 19, f"id=1, seed={2**64}", "ID=1"]


@every_path
@pytest.mark.parametrize("header", MALFORMED)
async def test_a_malformed_header_is_refused(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, header: str
) -> None:
    response = await http.post(path, json=BODIES[path], headers={"X-Weft-Gateway": header})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Weft-Gateway"
    assert repr(header) in response.json()["error"]["message"]
    assert engine.requests == []


async def test_the_header_comes_once(http: httpx.AsyncClient) -> None:
    twice = [("X-Weft-Gateway", "id=1"), ("X-Weft-Gateway", "id=2")]
    response = await http.post("/generate", json={"text": "hi"}, headers=twice)
    assert response.status_code == 400


async def test_other_endpoints_ignore_the_header(
    http: httpx.AsyncClient, embedder: httpx.AsyncClient, engine: FakeEngineClient
) -> None:
    engine.behaviour = embeds([0.5] * 4)
    for header in ("id=7, seed=8", "nonsense"):
        response = await embedder.post("/v1/embeddings", json={"input": "a"}, headers={"X-Weft-Gateway": header})
        assert response.status_code == 200
        assert "x-weft-worker-request-id" not in response.headers
        response = await http.post("/tokenize", json={"prompt": "a"}, headers={"X-Weft-Gateway": header})
        assert response.status_code == 200


async def test_abort_and_the_list_of_requests_keep_the_engines_id(
    app: FastAPI, http: httpx.AsyncClient, engine: FakeEngineClient
) -> None:
    call = await opened(app, engine, "/v1/completions")
    shown = (await http.get("/v1/requests")).json()["requests"]
    assert [record["id"] for record in shown] == [1]
    assert (await http.post("/abort", json={"request_id": 700})).status_code == 404
    assert (await http.post("/abort", json={"request_id": 1})).json() == {"aborted": 1}
    status, headers, _ = await call.answer()
    assert (status, headers["x-request-id"]) == (499, "700")


# ---- the tokens of a stream -------------------------------------------------------------------------------------


@every_path
async def test_an_event_begins_with_its_tokens(app: FastAPI, engine: FakeEngineClient, path: str) -> None:
    call = await opened(app, engine, path)
    engine.deliver(1, "", token_ids=[7])  # half a character: the first event leaves all the same
    await call.next()
    first = await call.next_data()
    assert first.startswith(b": tokens 7\ndata: {")
    assert first.count(b"\n\n") == 1
    assert text_of(first) == ""
    engine.deliver(1, "é", token_ids=[8])
    second = await call.next_data()
    assert second.startswith(b": tokens 8\ndata: {")
    assert text_of(second) == "é"
    engine.deliver(1, "", token_ids=[9, 10])
    held = await call.next_data()
    if path == "/generate":  # tells the ids to everybody
        assert held.startswith(b": tokens 9,10\ndata: ")
    else:
        assert held == b": tokens 9,10\n\n"
    engine.deliver(1, "c")
    assert (await call.next_data()).startswith(b"data: ")
    engine.deliver(1, "d", token_ids=[11], end=ended())
    last = await call.next_data()
    assert last.startswith(b": tokens 11\ndata: ")
    assert b'"finish_reason":"stop"' in last
    assert await call.next_data() == b"data: [DONE]\n\n"
    await call.done()


async def test_several_choices_tell_no_tokens(http: httpx.AsyncClient) -> None:
    body = BODIES["/v1/chat/completions"] | {"stream": True, "n": 2}
    response = await http.post("/v1/chat/completions", json=body, headers=HEADER)
    assert ": tokens" not in response.text
    response = await http.post("/generate", json={"text": ["a", "b"], "stream": True}, headers=HEADER)
    assert ": tokens" not in response.text


async def test_tokens_that_end_in_an_error_are_not_told(app: FastAPI, engine: FakeEngineClient) -> None:
    call = await opened(app, engine, "/v1/completions")
    engine.deliver(1, "a", token_ids=[7])
    await call.next()
    assert b": tokens 7\n" in await call.next_data()
    engine.deliver(1, "b", token_ids=[8], end=failed(503, "shutting down"))
    last = await call.next_data()
    assert last.startswith(b"event: error")
    assert b": tokens" not in last


def test_the_line() -> None:
    assert tokens_line([12]) == b": tokens 12\n"
    assert tokens_line([12, 0, 14]) == b": tokens 12,0,14\n"


@every_path
async def test_a_gateway_reads_it_as_its_client_should_see_it(
    app: FastAPI, http: httpx.AsyncClient, engine: FakeEngineClient, path: str
) -> None:
    body = BODIES[path] | {"stream": True}
    told = (await http.post(path, json=body, headers={"X-Weft-Gateway": "id=2"})).content
    plain = (await http.post(path, json=body)).content
    for size in (1, 7, len(told)):
        reader = EventReader()
        passed = b"".join(reader.feed(told[i : i + size]) for i in range(0, len(told), size))
        assert _without_times(passed) == _without_times(plain)
        assert reader.token_ids() == [100, 101]
        assert reader.done


def _without_times(events: bytes) -> list[bytes]:
    pieces = events.split(b'"created":') if b'"created":' in events else events.split(b'"e2e_latency_s":')
    return [pieces[0], *(piece.lstrip(b"0123456789.e-") for piece in pieces[1:])]


# ---- answers that go on -----------------------------------------------------------------------------------------


@every_path
async def test_an_answer_goes_on(app: FastAPI, engine: FakeEngineClient, path: str) -> None:
    call = await opened(app, engine, path, weft_resume=RESUME)
    (request,) = engine.requests
    assert (request.resume_ids, request.resume_chars, request.stream) == ([100, 101], None, True)
    engine.deliver(1, "", token_ids=[7])
    await call.next()
    assert await call.next_data() == b": tokens 7\n\n" or path == "/generate"  # no event for half a character
    engine.deliver(1, " there", token_ids=[8])
    data = await call.next_data()
    assert text_of(data) == " there"
    assert b"role" not in data
    assert b'"created":1600000000,' in data or path == "/generate"
    engine.deliver(1, end=ended("length", completion_tokens=4))
    last = await call.next_data()
    assert b'"finish_reason":"length"' in last
    assert b"role" not in last
    await call.done()


@every_path
async def test_without_a_gateways_header_it_goes_on_too(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str
) -> None:
    resume = {"token_ids": [5], "chars": 3}
    response = await http.post(path, json=BODIES[path] | {"stream": True, "weft_resume": resume})
    assert response.status_code == 200
    assert (engine.requests[0].resume_ids, engine.requests[0].resume_chars) == ([5], 3)
    assert b"role" not in response.content
    assert response.headers["x-request-id"] == "1"


@every_path
async def test_null_is_no_answer_that_has_begun(http: httpx.AsyncClient, engine: FakeEngineClient, path: str) -> None:
    response = await http.post(path, json=BODIES[path] | {"stream": True, "weft_resume": None})
    assert response.status_code == 200
    assert (engine.requests[0].resume_ids, engine.requests[0].resume_chars) == ([], None)
    assert (b"role" in response.content) == (path == "/v1/chat/completions")


async def test_an_answer_that_has_begun_without_a_token(http: httpx.AsyncClient) -> None:
    body = BODIES["/v1/chat/completions"] | {"stream": True, "weft_resume": {"token_ids": []}}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert b"role" not in response.content


async def test_the_places_of_logprobs_go_on(app: FastAPI, engine: FakeEngineClient) -> None:
    call = await opened(app, engine, "/v1/completions", weft_resume=RESUME, logprobs=1)
    engine.deliver(1, "é b", token_ids=[7, 8], logprobs=[logprob("é"), logprob(" b")], resumed_bytes="Añ".encode())
    await call.next()
    data = await call.next_data()
    (choice,) = json.loads(data[data.index(b"data: ") + 6 :])["choices"]
    assert choice["logprobs"]["text_offset"] == [2, 3]
    engine.deliver(1, end=ended())
    await call.done()


async def test_deltas_that_wait_are_merged_with_the_first(app: FastAPI, engine: FakeEngineClient) -> None:
    call = await opened(app, engine, "/v1/completions", weft_resume=RESUME, logprobs=0)
    engine.deliver(1, "a", token_ids=[7], logprobs=[logprob("a")], resumed_bytes=b"abc")
    engine.deliver(1, "b", token_ids=[8], logprobs=[logprob("b")])
    await call.next()
    data = await call.next_data()
    assert data.startswith(b": tokens 7,8\n")
    assert b'"text_offset":[3,4]' in data
    engine.deliver(1, end=ended())
    await call.done()


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no stream": ({"stream": False}, "weft_resume", "only allowed with stream"),
    "beyond the vocabulary": ({"weft_resume": {"token_ids": [1000]}}, "weft_resume", "1000 is not in the vocabulary"),
    "negative": ({"weft_resume": {"token_ids": [-1]}}, "weft_resume", "-1 is not allowed"),
    "no ids": ({"weft_resume": {"token_ids": ["a"]}}, "weft_resume", "'a' is not allowed"),
    "too many": ({"weft_resume": {"token_ids": [1] * 9}}, "weft_resume", "9 tokens, but only 8 may be generated"),
    "no context": ({"weft_resume": {"token_ids": [1] * 64}}, "weft_resume", "64 tokens, but at most 63"),
    "no list": ({"weft_resume": {"token_ids": 7}}, "weft_resume", "7 is not allowed"),
    "missing": ({"weft_resume": {"chars": 7}}, "weft_resume.token_ids", "this field is needed"),
    "chars": ({"weft_resume": {"token_ids": [1], "chars": -1}}, "weft_resume.chars", "-1 is not allowed"),
    "created": ({"weft_resume": {"token_ids": [1], "created": 1.5}}, "weft_resume.created", "1.5 is not allowed"),
    "unknown": ({"weft_resume": {"token_ids": [1], "text": "a"}}, "weft_resume.text", "not a parameter"),
    "list": ({"weft_resume": [1]}, "weft_resume", "is not allowed"),
}


@every_path
@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_go_on_is_refused(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, case: str
) -> None:
    fields, param, message = REFUSED[case]
    response = await http.post(path, json=BODIES[path] | {"stream": True, "weft_resume": {"token_ids": [1]}} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/chat/completions", {"n": 2}, "for one prompt and n 1"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "for one prompt and n 1"),
        ("/generate", {"text": ["a", "b"]}, "for one prompt and n 1"),
        ("/v1/completions", {"echo": True}, "without echo"),
        ("/v1/completions", {"max_tokens": None, "weft_resume": {"token_ids": [1] * 17}}, "only 16 may be"),
    ],
)
async def test_only_one_answer_goes_on(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, fields: dict[str, Any], message: str
) -> None:
    response = await http.post(path, json=BODIES[path] | {"stream": True, "weft_resume": RESUME} | fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert engine.requests == []


async def test_no_embedding_goes_on(embedder: httpx.AsyncClient) -> None:
    response = await embedder.post("/v1/embeddings", json={"input": "a", "weft_resume": RESUME})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unknown_parameter"


async def test_a_list_of_one_prompt_goes_on(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says("x", end=ended())
    for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
        response = await http.post(path, json={field: ["hi"], "stream": True, "weft_resume": RESUME}, headers=HEADER)
        assert response.status_code == 200
        assert ": tokens 100\n" in response.text
