"""A full server says so on arrival: places are taken all or none, before a body is read, and every one comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.server.driver import PATIENCE_S, Call
from tests.server.fakes import FACTS, FakeEngineClient, ended, failed, silent
from weft.config.settings import HttpSettings, Settings
from weft.core.errors import EngineError, QueueFullError
from weft.server import create_app
from weft.server.admission import Admission

TEXT = "/v1/completions"
PLACES = 256 + 64


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient(silent)


@pytest.fixture
def plain(engine: FakeEngineClient) -> FastAPI:
    """An app without priorities."""
    return create_app(engine, FACTS, Settings(http=HttpSettings()))  # type: ignore[arg-type]


def fill(app: FastAPI, *, priority: int = 0) -> Call:
    """Takes all places but those of one more request for 64 answers."""
    return Call(app, TEXT, {"prompt": ["x"] * 64, "n": 4, "priority": priority})


async def fill_all(app: FastAPI, engine: FakeEngineClient, *, priority: int = 0) -> list[Call]:
    calls = [fill(app, priority=priority), Call(app, TEXT, {"prompt": ["x"] * 64, "priority": priority})]
    while engine.open_requests < PLACES:
        await asyncio.sleep(0)
    return calls


async def leave(*calls: Call) -> None:
    for call in calls:
        call.disconnect()
    for call in calls:
        await call.done()


# ---- the counter ------------------------------------------------------------------------------------------------


def test_all_places_or_none() -> None:
    admission = Admission(3, 2, priority=False)
    admission.reserve(4, 0, 1.0)
    with pytest.raises(QueueFullError):
        admission.reserve(2, 0, 1.0)
    assert admission.used == 4
    admission.reserve(1, 0, 1.0)
    with pytest.raises(QueueFullError) as full:
        admission.check_room(2.5)
    assert full.value.retry_after_s == 2.5
    admission.free(0)
    admission.check_room(1.0)
    admission.reserve(1, 0, 1.0)


def test_priority_means_nothing_where_it_is_off() -> None:
    admission = Admission(1, 1, priority=False)
    admission.reserve(2, 5, 1.0)
    with pytest.raises(QueueFullError):
        admission.reserve(1, 0, 1.0)


def test_what_is_better_than_the_worst_passes_up_to_a_bound() -> None:
    admission = Admission(2, 1, priority=True)
    admission.reserve(2, 5, 1.0)
    admission.reserve(1, 3, 1.0)
    admission.check_room(1.0)
    for priority in (5, 6):
        with pytest.raises(QueueFullError):
            admission.reserve(1, priority, 1.0)
    admission.reserve(1, 4, 1.0)  # the worst is 5
    admission.reserve(1, -1, 1.0)
    with pytest.raises(QueueFullError):
        admission.reserve(1, -2, 1.0)
    with pytest.raises(QueueFullError):
        admission.check_room(1.0)
    admission.free(5, 2)
    with pytest.raises(QueueFullError):
        admission.reserve(1, 4, 1.0)  # now the worst
    admission.reserve(1, 3, 1.0)


# ---- over HTTP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_server_is_429_with_the_engines_retry_after(
    app: FastAPI, engine: FakeEngineClient, stream: bool
) -> None:
    calls = await fill_all(app, engine)
    status, headers, body = await Call(app, TEXT, {"prompt": "x", "stream": stream}).answer()
    assert (status, headers["retry-after"]) == (429, "8")  # 7.2, rounded up
    assert json.loads(body)["error"]["code"] == "queue_full"
    assert len(engine.requests) == 2 * 64
    await leave(*calls)
    assert app.state.server.admission.used == 0


async def test_a_full_server_does_not_read_the_body(plain: FastAPI, engine: FakeEngineClient) -> None:
    calls = await fill_all(plain, engine)
    late = Call(plain, TEXT, chunks=[b'{"prompt": '], then_hang=True)
    assert (await asyncio.wait_for(late.answer(), PATIENCE_S))[0] == 429
    assert late.received_chunks == 0
    await leave(*calls)


async def test_a_job_that_does_not_fit_takes_nothing(app: FastAPI, engine: FakeEngineClient) -> None:
    call = fill(app)
    await engine.submitted.wait()
    assert (await Call(app, TEXT, {"prompt": "x", "n": 65}).answer())[0] == 429
    assert app.state.server.admission.used == 256
    fits = Call(app, TEXT, {"prompt": "x", "n": 64})
    while engine.open_requests < PLACES:
        await asyncio.sleep(0)
    await leave(call, fits)


async def test_a_job_that_can_never_fit_is_400(app: FastAPI) -> None:
    status, _, body = await Call(app, TEXT, {"prompt": ["x"] * 3, "n": 100}).answer()
    assert (status, json.loads(body)["error"]["param"]) == (400, "n")


async def test_every_way_to_end_gives_the_place_back(app: FastAPI, engine: FakeEngineClient) -> None:
    admission = app.state.server.admission
    call = Call(app, TEXT, {"prompt": "x", "n": 3, "stream": True})
    await engine.submitted.wait()
    assert admission.used == 3
    engine.deliver(1, "x", end=ended())
    assert admission.used == 2
    engine.deliver(2, end=failed(500))  # ends the whole answer
    await call.done()
    assert admission.used == 0
    gone = Call(app, TEXT, {"prompt": "x", "n": 2})
    while admission.used < 2:
        await asyncio.sleep(0)
    await leave(gone)
    assert admission.used == 0


@pytest.mark.parametrize("body", [{"prompt": "x", "temperature": -1}, {"prompt": "x", "frobnicate": 1}, {"prompt": ""}])
async def test_a_refused_body_holds_no_place(app: FastAPI, body: dict[str, Any]) -> None:
    assert (await Call(app, TEXT, body).answer())[0] == 400
    assert app.state.server.admission.used == 0


async def test_a_submit_that_fails_holds_no_place(app: FastAPI, engine: FakeEngineClient) -> None:
    def breaks(client: FakeEngineClient, request: Any) -> None:
        raise ZeroDivisionError

    engine.behaviour = breaks
    assert (await Call(app, TEXT, {"prompt": "x", "n": 2}).answer())[0] == 500
    engine.failure = EngineError("it crashed")
    assert (await Call(app, TEXT, {"prompt": "x"}).answer())[0] == 503
    assert app.state.server.admission.used == 0


async def test_a_better_priority_passes_and_the_engine_decides(app: FastAPI, engine: FakeEngineClient) -> None:
    calls = await fill_all(app, engine, priority=1)
    assert (await Call(app, TEXT, {"prompt": "x", "priority": 1}).answer())[0] == 429
    better = Call(app, TEXT, {"prompt": "x"})
    while engine.open_requests == PLACES:
        await asyncio.sleep(0)
    (request_id,) = engine.requests[-1].request_ids
    engine.deliver(request_id, end=failed(429, "nothing is worse", state="rejected", code="queue_full"))
    assert (await better.answer())[0] == 429
    displaced = engine.requests[0].request_ids[0]
    engine.deliver(displaced, end=failed(503, "pushed out", state="rejected", code="displaced"))
    status, _, body = await calls[0].answer()
    assert (status, json.loads(body)["error"]["code"]) == (503, "displaced")
    await leave(calls[1])
    assert app.state.server.measures.rejections["displaced"] == 1
    assert app.state.server.admission.used == 0


async def test_priorities_of_a_server_without_them(plain: FastAPI) -> None:
    status, _, body = await Call(plain, TEXT, {"prompt": "x", "priority": 1}).answer()
    assert (status, json.loads(body)["error"]["param"]) == (400, "priority")
