"""`EngineClient` over real sockets; the test plays the children."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from weft.core.errors import EngineError, UnavailableError, WeftError
from weft.core.sampling import SamplingParams
from weft.engine.client import EngineClient, StartError
from weft.ipc.messages import (
    Abort,
    End,
    EngineQuery,
    EngineReply,
    ErrorInfo,
    Heartbeat,
    Ready,
    StartFailed,
    TextBatch,
    TextDelta,
    TextLogprob,
    TextRequest,
    decode_to_engine,
    decode_to_text,
)
from weft.ipc.sockets import Endpoints, Inbox, Outbox

ROLES = ("engine", "text0", "text1")
PATIENCE_S = 10.0


class Children:
    """One engine and two text processes, as far as messages go."""

    def __init__(self, context: zmq.Context[Any], endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.engine = Inbox(context, endpoints.engine, decode_to_engine)
        self.texts = [Inbox(context, endpoints.text(i), decode_to_text) for i in range(endpoints.num_text)]
        self.api = Outbox(context, endpoints.api)

    def get_ready(self) -> None:
        for role in ROLES:
            self.api.send(Ready(role, {"role": role}))

    def answer(self, *deltas: TextDelta) -> None:
        self.api.send(TextBatch(list(deltas)))

    def close(self) -> None:
        for socket in (self.engine, *self.texts, self.api):
            socket.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(Endpoints(tmp_path, 2))
    client.start(ROLES)
    yield client
    await client.close()


@pytest.fixture
async def children(client: EngineClient, context: zmq.Context[Any], tmp_path: Path) -> AsyncIterator[Children]:
    children = Children(context, Endpoints(tmp_path, 2))
    children.get_ready()
    await within(client.wait_ready())
    yield children
    children.close()


async def within(work: Any) -> Any:
    return await asyncio.wait_for(work, PATIENCE_S)


def got(inbox: Inbox[Any]) -> list[Any]:
    return list(inbox.receive(PATIENCE_S))


def request(*ids: int) -> TextRequest:
    return TextRequest(list(ids), SamplingParams(), text="x")


def done(request_id: int, **fields: Any) -> TextDelta:
    return TextDelta(request_id, end=End("completed", "stop"), **fields)


# ---- requests ---------------------------------------------------------------------------------------------------


async def test_deltas_reach_who_submitted(client: EngineClient, children: Children) -> None:
    ended: list[tuple[int, str | None]] = []
    one = client.submit(request(2), on_end=lambda i, end: ended.append((i, end.state if end else None)))
    two = client.submit(request(4))
    (arrived,) = got(children.texts[0])[:1]
    assert arrived.request_ids == [2]
    children.answer(TextDelta(2, "a", [1]), TextDelta(4, "x", [1]), TextDelta(99, "nobody's"))
    children.answer(done(2, text="b"))
    deltas = await within(one.take())
    while deltas[-1].end is None:
        deltas += await within(one.take())
    assert "".join(delta.text for delta in deltas) == "ab"
    assert await within(one.take()) == []
    assert ended == [(2, "completed")]
    assert [delta.text for delta in await within(two.take())] == ["x"]
    assert client.open_ids == [4]
    two.close()
    assert client.open_ids == []


async def test_a_cancelled_wait_loses_nothing(client: EngineClient, children: Children) -> None:
    generation = client.submit(request(1))
    waiting = asyncio.ensure_future(generation.take())
    await asyncio.sleep(0)
    waiting.cancel()
    children.answer(done(1, text="a"))
    (delta,) = await within(generation.take())
    assert delta.text == "a"


async def test_aborts_name_their_ids_and_when(client: EngineClient, children: Children) -> None:
    """All means all that are open now: one that comes a moment later must not be hit."""
    before = time.monotonic()
    generation = client.submit(request(1, 2))
    client.submit(request(3))
    client.abort(None)
    for inbox in (children.engine, *children.texts):
        messages = got(inbox)
        while not isinstance(messages[-1], Abort):
            messages += got(inbox)
        assert messages[-1].request_ids == [1, 2, 3]
        assert before <= messages[-1].sent_s <= time.monotonic()
    children.answer(*(TextDelta(i, end=End("cancelled", error=ErrorInfo(499, "gone"))) for i in (1, 2)))
    deltas = await within(generation.take())
    assert [delta.end.state for delta in deltas if delta.end] == ["cancelled"] * len(deltas)


async def test_close_aborts_what_has_not_ended_and_tells_once(client: EngineClient, children: Children) -> None:
    ended: list[tuple[int, str | None]] = []
    generation = client.submit(request(1, 2), on_end=lambda i, end: ended.append((i, end.state if end else None)))
    children.answer(done(1))
    await within(generation.take())
    generation.close()
    generation.close()
    children.answer(done(2))
    (abort,) = got(children.engine)
    assert abort.request_ids == [2]
    assert ended == [(1, "completed"), (2, None)]


async def test_what_waits_for_its_turn_can_be_aborted(client: EngineClient, children: Children) -> None:
    generation = client.submit(request(2), request(4), request(6), at_once=1)
    assert [message.request_ids for message in got(children.texts[0])] == [[2]]
    client.abort([6])
    (delta,) = await within(generation.take())
    assert delta.request_id == 6 and delta.end is not None and delta.end.state == "cancelled"
    assert [message.request_ids for message in got(children.texts[0])] == [[6]]  # nobody there knows it
    children.answer(done(2))
    assert [delta.request_id for delta in await within(generation.take())] == [2]
    assert [message.request_ids for message in got(children.texts[0])] == [[4]]
    generation.close()
    assert client.open_ids == []


async def test_a_request_that_cannot_be_sent_leaves_nothing(client: EngineClient, children: Children) -> None:
    ended: list[int] = []
    with pytest.raises(TypeError):
        client.submit(TextRequest([1], object(), text="x"), on_end=lambda i, end: ended.append(i))  # type: ignore[arg-type]
    assert client.open_ids == []
    assert ended == []


async def test_very_many_log_probabilities_come_in_parts(client: EngineClient, children: Children) -> None:
    """And between the parts, others have their turn."""
    generation = client.submit(request(1))
    entries = [TextLogprob("a", b"a", -1.0, [])] * 1500
    for delta in (TextDelta(1, "a", logprobs=entries), TextDelta(1, "b", logprobs=entries), done(1, text="c")):
        generation.deliver(delta)
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    (first,) = await generation.take()
    assert turns == []
    (second,) = await generation.take()
    assert turns == [1]
    assert (first.text, second.text) == ("ab", "c")
    assert await generation.take() == []


# ---- life -------------------------------------------------------------------------------------------------------


async def test_heartbeats_by_role(client: EngineClient, children: Children) -> None:
    assert set(client.last_heartbeat_s) == set(ROLES)  # a child that hangs from the start is seen, too
    before = dict(client.last_heartbeat_s)
    children.api.send(Heartbeat("text1", retry_after_s=99.0))
    children.api.send(Heartbeat("engine", retry_after_s=3.5))
    children.api.send(EngineReply(0))
    generation = client.submit(request(1))
    children.answer(done(1))
    await within(generation.take())
    assert client.last_heartbeat_s["text0"] == before["text0"]
    assert client.last_heartbeat_s["text1"] > before["text1"]
    assert client.retry_after_s == 3.5


async def test_questions(client: EngineClient, children: Children) -> None:
    asked = asyncio.ensure_future(client.engine_query("request", request_id=7))
    await asyncio.sleep(0)
    (query,) = got(children.engine)
    assert isinstance(query, EngineQuery)
    assert (query.op, query.request_id) == ("request", 7)
    children.api.send(EngineReply(query.call_id, {"id": 7}))
    assert await within(asked) == {"id": 7}
    asked = asyncio.ensure_future(client.engine_query("end_session", session_id="s"))
    await asyncio.sleep(0)
    (query,) = got(children.engine)
    assert query.session_id == "s"
    children.api.send(EngineReply(query.call_id, error=ErrorInfo(404, "no such session", code="not_found")))
    with pytest.raises(WeftError, match="no such session") as caught:
        await within(asked)
    assert caught.value.http_status == 404


async def test_a_failure_ends_everything_once(client: EngineClient, children: Children) -> None:
    ended: list[tuple[int, str | None]] = []
    generation = client.submit(request(1, 2), on_end=lambda i, end: ended.append((i, end.state if end else None)))
    asked = asyncio.ensure_future(client.engine_query("stats"))
    await asyncio.sleep(0)
    client.fail(UnavailableError("the engine process died", code="engine_dead"))
    client.fail(EngineError("a second one tells nothing new"))
    deltas = await within(generation.take())
    assert [(delta.request_id, delta.end.error.code) for delta in deltas] == [(1, "engine_dead"), (2, "engine_dead")]  # type: ignore[union-attr]
    assert ended == [(1, "failed"), (2, "failed")]
    with pytest.raises(UnavailableError, match="died"):
        await within(asked)
    with pytest.raises(UnavailableError, match="died"):
        client.submit(request(3))
    assert client.open_requests == 0
    await within(client.wait_failure(PATIENCE_S))


async def test_a_child_that_cannot_start(client: EngineClient, context: zmq.Context[Any], tmp_path: Path) -> None:
    Outbox(context, Endpoints(tmp_path, 2).api).send(StartFailed("engine", "no such model", 2))
    with pytest.raises(StartError, match="no such model") as caught:
        await within(client.wait_ready())
    assert caught.value.exit_code == 2


async def test_a_new_set_of_children(
    client: EngineClient, children: Children, context: zmq.Context[Any], tmp_path: Path
) -> None:
    (lost,) = client.new_ids(1)
    client.submit(request(lost))
    client.fail(UnavailableError("the engine process died", code="engine_dead"))
    endpoints = Endpoints(tmp_path / "again", 2)
    endpoints.folder.mkdir()
    client.reopen(endpoints, ROLES)
    with pytest.raises(UnavailableError, match="died") as caught:
        client.submit(request(5))
    assert caught.value.code == "loading"
    assert client.last_heartbeat_s == {}
    again = Children(context, endpoints)
    again.get_ready()
    assert (await within(client.wait_ready()))["text1"] == {"role": "text1"}
    assert client.failure is None
    (new,) = client.new_ids(1)
    assert new > lost
    generation = client.submit(request(new))
    children.answer(TextDelta(new, "from the dead"))
    again.answer(done(new, text="alive"))
    (delta,) = await within(generation.take())
    assert delta.text == "alive"
    again.close()


async def test_a_new_set_that_fails_too(client: EngineClient, children: Children, tmp_path: Path) -> None:
    client.fail(UnavailableError("first", code="engine_dead"))
    (tmp_path / "again").mkdir()
    client.reopen(Endpoints(tmp_path / "again", 2), ROLES)
    waiting = asyncio.ensure_future(client.wait_ready())
    client.fail(UnavailableError("second", code="engine_dead"))
    with pytest.raises(UnavailableError, match="second"):
        await within(waiting)
    with pytest.raises(UnavailableError, match="second") as caught:
        client.check_alive()
    assert caught.value.code == "unavailable"
