"""Large bodies are parsed by helper processes: the same answers, and the event loop stays free."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

from tests.server.driver import PATIENCE_S, Call
from tests.server.fakes import FakeEngineClient
from weft.core.errors import EngineError, InvalidRequestError
from weft.server import readers
from weft.server.bodies import INLINE_BYTES, parse_body
from weft.server.readers import BodyReaders
from weft.server.schemas import ChatRequest, CompletionRequest, GenerateRequest

LONG = "é, \n" * INLINE_BYTES
CONTEXT = 1000
HI = {"role": "user", "content": "hi"}


@pytest.fixture
async def pool() -> AsyncIterator[BodyReaders]:
    pool = BodyReaders(CONTEXT)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"prompt": LONG, "stop": ["x"], "logit_bias": {"5": 1}}),
        (CompletionRequest, {"prompt": [[1, 2, 3], [4]], "timeout_s": 2.5}),
        (ChatRequest, {"messages": [HI, {"role": "developer", "content": [{"type": "text", "text": LONG}]}]}),
        (GenerateRequest, {"input_ids": [5] * 999, "sampling_params": {"temperature": 0}}),
    ],
)
async def test_a_helper_reads_what_this_process_would(pool: BodyReaders, schema: Any, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert await pool.parse([data], schema) == parse_body(data, schema, CONTEXT)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"prompt": ""}', b'{"prompt": "x", "mood": 1}', b'{"prompt": 5}'])
async def test_a_helper_refuses_what_this_process_would(pool: BodyReaders, data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as here:
        parse_body(data, CompletionRequest, CONTEXT)
    with pytest.raises(InvalidRequestError) as there:
        await pool.parse([data], CompletionRequest)
    assert (there.value.message, there.value.param, there.value.code) == (
        here.value.message,
        here.value.param,
        here.value.code,
    )


async def test_large_bodies_over_http(app: FastAPI, engine: FakeEngineClient) -> None:
    for body in ({"prompt": LONG}, {"prompt": LONG, "mood": 1}, {"prompt": "small"}):
        status, _, answer = await Call(app, "/v1/completions", body).answer()
        assert status == (400 if "mood" in body else 200), answer
    assert [request.text for request in engine.requests] == [LONG, "small"]
    app.state.server.readers.close()


async def test_several_at_once(pool: BodyReaders) -> None:
    bodies = [json.dumps({"prompt": f"{i}" * 1000}).encode() for i in range(2 * readers.MAX_HELPERS)]
    parsed = await asyncio.gather(*(pool.parse([data], CompletionRequest) for data in bodies))
    assert [body.prompt[0].text for body in parsed] == [f"{i}" * 1000 for i in range(len(bodies))]


async def test_a_helper_that_dies_fails_its_request_only(pool: BodyReaders) -> None:
    await pool.parse([b'{"prompt": "x"}'], CompletionRequest)
    (helper,) = pool._idle
    assert helper._process is not None
    os.kill(helper._process.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        await pool.parse([b'{"prompt": "x"}'], CompletionRequest)
    assert (await pool.parse([b'{"prompt": "y"}'], CompletionRequest)).prompt[0].text == "y"


async def test_nobody_waits_any_more(pool: BodyReaders) -> None:
    await pool.parse([b'{"prompt": "x"}'], CompletionRequest)
    (helper,) = pool._idle
    assert helper._process is not None
    os.kill(helper._process.pid, signal.SIGSTOP)  # it will not answer
    waiting = asyncio.ensure_future(pool.parse([b'{"prompt": "x"}'], CompletionRequest))
    await asyncio.sleep(0)
    assert not pool._idle
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(asyncio.to_thread(helper._process.wait), PATIENCE_S)
    assert (await pool.parse([b'{"prompt": "y"}'], CompletionRequest)).prompt[0].text == "y"


async def test_memory_is_given_back_after_a_very_large_body(pool: BodyReaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "RETIRING_BYTES", 100)
    await pool.parse([b'{"prompt": "x"}'], CompletionRequest)
    assert len(pool._idle) == 1
    await pool.parse([json.dumps({"prompt": "x" * 100}).encode()], CompletionRequest)
    assert pool._idle == []
