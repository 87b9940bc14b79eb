"""Streams, message by message: when headers leave, what errors become, and that a vanished client ends its work."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI

from tests.server.driver import PATIENCE_S, Call
from tests.server.fakes import FACTS, FakeEngineClient, ended, failed, settings, silent
from weft.server import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/generate": {"text": "hi", "stream": True},
}


def app_over(engine: FakeEngineClient, **http: object) -> FastAPI:
    return create_app(engine, FACTS, settings(**http))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient(silent)


@pytest.mark.parametrize("path", PATHS)
async def test_headers_leave_with_the_first_token(app: FastAPI, engine: FakeEngineClient, path: str) -> None:
    call = Call(app, path, PATHS[path])
    await engine.submitted.wait()
    await asyncio.sleep(0)
    assert call.nothing_sent
    engine.deliver(1, "He", token_ids=[7])
    start = await call.next()
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b'"He"' in await call.next_data()
    engine.deliver(1, "llo", token_ids=[8], end=ended())
    assert b'"llo"' in await call.next_data()
    assert (await call.next_data()).endswith(b"data: [DONE]\n\n")
    await call.done()
    assert engine.aborted == []
    assert engine.open_requests == 0


async def test_waiting_deltas_leave_in_one_event(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/chat/completions", CHAT | {"n": 2, "stream_options": {"include_usage": True}})
    await engine.submitted.wait()
    for text in "abc":
        engine.deliver(1, text)
        engine.deliver(2, text.upper())
    await call.next()
    first, second, rest = (await call.next_data()).split(b"\n\n")
    assert b'"index":0,"delta":{"role":"assistant","content":"abc"}' in first
    assert b'"index":1,"delta":{"role":"assistant","content":"ABC"}' in second
    assert rest == b""
    engine.deliver(1, end=ended())
    engine.deliver(2, end=ended())
    await call.done()


async def test_text_that_waits_with_an_error_goes_out_before_it(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/completions", {"prompt": "hi", "stream": True})
    await engine.submitted.wait()
    engine.deliver(1, "x")
    assert (await call.next())["status"] == 200
    assert b'"text":"x"' in await call.next_data()
    for text in "abc":
        engine.deliver(1, text)
    engine.deliver(1, end=failed(500, "scripted"))
    assert b'"text":"abc"' in await call.next_data()
    assert (await call.next_data()).startswith(b"event: error\n")
    await call.done()


async def test_text_less_deltas_send_nothing(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/completions", {"prompt": "hi", "stream": True})
    await engine.submitted.wait()
    for text in ("a", "", ""):
        engine.deliver(1, text)
    await call.next()
    assert (await call.next_data()).count(b"data: ") == 1
    engine.deliver(1, end=ended())
    await call.done()


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_before_the_first_token_has_its_status(
    app: FastAPI, engine: FakeEngineClient, path: str
) -> None:
    call = Call(app, path, PATHS[path])
    await engine.submitted.wait()
    engine.deliver(1, end=failed(429, "the queue is full", retry_after_s=2.5, code="queue_full"))
    status, headers, body = await call.answer()
    assert (status, headers["retry-after"], headers["x-request-id"]) == (429, "3", "1")
    error = json.loads(body)["error"]
    assert error == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


@pytest.mark.parametrize("status", [400, 408, 499, 500, 503])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_ending_has_its_status(app: FastAPI, engine: FakeEngineClient, status: int, stream: bool) -> None:
    call = Call(app, "/v1/completions", {"prompt": "hi", "stream": stream})
    await engine.submitted.wait()
    engine.deliver(1, end=failed(status, "scripted", param="prompt", code="why"))
    got, _, body = await call.answer()
    assert got == status
    assert json.loads(body)["error"]["code"] == "why"
    assert json.loads(body)["error"]["param"] == "prompt"


async def test_an_error_after_the_first_token_is_one_event_and_the_end(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/chat/completions", CHAT | {"n": 2})
    await engine.submitted.wait()
    engine.deliver(1, "He")
    await call.next()
    await call.next_data()
    engine.deliver(1, "llo")
    engine.deliver(1, end=failed(500, "the engine broke"))
    engine.deliver(2, "never shown")
    assert b'"llo"' in await call.next_data()
    last = await call.next()
    event, data = last["body"].decode().strip().split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "the engine broke"
    assert not last["more_body"]
    await call.done()
    assert engine.aborted == [2]
    assert engine.open_requests == 0


async def test_keep_alive_comments_while_nothing_comes(engine: FakeEngineClient) -> None:
    call = Call(app_over(engine, sse_keep_alive_s=0.01), "/v1/chat/completions", CHAT)
    assert (await call.next())["status"] == 200
    assert await call.next_data() == b": keep-alive\n\n"
    assert await call.next_data() == b": keep-alive\n\n"
    engine.deliver(1, end=failed(408, "too late", code="timeout"))
    while (data := await call.next_data()) == b": keep-alive\n\n":
        pass
    assert data.startswith(b"event: error\n")
    await call.done()


async def test_a_bug_in_a_stream_ends_this_stream_only(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/chat/completions", CHAT)
    await engine.submitted.wait()
    engine.deliver(1, "He")
    await call.next()
    await call.next_data()
    engine.deliver(1, object())  # type: ignore[arg-type]
    assert b'"code":"internal"' in await call.next_data()
    await call.done()
    assert engine.aborted == [1]
    engine.behaviour = lambda client, request: client.deliver(request.request_ids[0], "fine", end=ended())
    assert (await Call(app, "/v1/completions", {"prompt": "hi"}).answer())[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_a_vanished_client_ends_its_work_at_once(
    app: FastAPI, engine: FakeEngineClient, path: str, stream: bool
) -> None:
    call = Call(app, path, PATHS[path] | {"stream": stream})
    await engine.submitted.wait()
    engine.deliver(1, "He")
    if stream:
        await call.next()
        await call.next_data()
    call.disconnect()
    await asyncio.wait_for(engine.abort_seen.wait(), PATIENCE_S)
    await call.done()
    assert engine.aborted == [1]
    assert engine.open_requests == 0
    assert app.state.gate.open == 0
    assert app.state.server.jobs == {}


async def test_a_client_that_vanishes_before_the_first_token(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/chat/completions", CHAT | {"n": 3})
    await engine.submitted.wait()
    call.disconnect()
    await call.done()
    assert engine.aborted == [1, 2, 3]
    assert call.nothing_sent


async def test_a_client_that_vanishes_while_sending_its_body(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/chat/completions", chunks=[b'{"mess'], then_hang=True)
    await asyncio.sleep(0)
    call.disconnect()
    await call.done()
    assert engine.requests == []


async def test_one_failed_choice_ends_the_others(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    await engine.submitted.wait()
    engine.deliver(1, "x", end=ended())
    engine.deliver(3, end=failed(400, "too long", code="context_length_exceeded"))
    status, _, body = await call.answer()
    assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
    assert engine.aborted == [2, 4]


async def test_cancelling_the_server_task_ends_the_work(app: FastAPI, engine: FakeEngineClient) -> None:
    call = Call(app, "/v1/chat/completions", CHAT)
    await engine.submitted.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.done()
    assert engine.aborted == [1]
    assert app.state.gate.open == 0
