"""WS /ws/streaming/{session_id} over a scripted engine: turns, stops, disconnects, wrong frames, bounds."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fastapi import FastAPI

from tests.server.driver import PATIENCE_S, Call
from tests.server.fakes import (
    FACTS,
    Behaviour,
    FakeEngineClient,
    FakeSpeaker,
    ended,
    failed,
    says,
    says_one_by_one,
    settings,
    silent,
)
from tests.server.ws_driver import Socket
from weft.config.settings import HttpSettings, KvCacheSettings, SchedulerSettings, Settings
from weft.core.errors import EngineError, InvalidRequestError, NotFoundError
from weft.core.sampling import SamplingParams
from weft.ipc.messages import TextRequest
from weft.server import create_app


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def talks(answer: Behaviour, prefill: Behaviour | None = None) -> Behaviour:
    """Prefills, which are not streamed, end at once; the others do as `answer` does."""
    filled = prefill or says("discarded", end=ended("length", 1, prompt_tokens=12, cached_tokens=4))

    def behaviour(client: FakeEngineClient, request: TextRequest) -> None:
        (answer if request.stream else filled)(client, request)

    return behaviour


def app_with(engine: FakeEngineClient, kv: dict[str, Any] | None = None, **http: Any) -> FastAPI:
    made = Settings(
        http=HttpSettings(**http), kv_cache=KvCacheSettings(**kv or {}), scheduler=SchedulerSettings(priority=True)
    )
    return create_app(engine, FACTS, made)  # type: ignore[arg-type]


async def generating(engine: FakeEngineClient, socket: Socket, content: str = "hi", **fields: Any) -> int:
    """A turn whose answer the test delivers; its request id."""
    engine.behaviour = talks(silent)
    assert (await socket.prefill(content))["type"] == "prefill_done"
    engine.submitted.clear()
    socket.send("generate", **fields)
    async with asyncio.timeout(PATIENCE_S):
        await engine.submitted.wait()
    return engine.requests[-1].request_ids[0]


async def eventually(is_so: Callable[[], bool]) -> None:
    """Lets everything run that can run now; nothing here waits for a clock or another thread."""
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became so")


async def error_of(socket: Socket) -> tuple[str, str | None]:
    frame = await socket.next()
    assert frame["type"] == "error" and frame["message"], frame
    return frame["code"], frame.get("param")


# ---- turns ----------------------------------------------------------------------------------------------------


async def test_each_turn_submits_the_whole_conversation(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says_one_by_one("Hel", "lo", end=ended(completion_tokens=3)))
    socket = await Socket(app, "a/b~").open()
    system = {"role": "developer", "content": "Be brief."}
    socket.send("prefill", messages=[system, user("one")])
    filled = await socket.next()
    assert filled | {"epoch": None} == {
        "type": "prefill_done",
        "cached_tokens": 4,
        "input_tokens": 8,
        "message_count": 2,
        "epoch": None,
    }
    socket.send("generate", temperature=0, max_new_tokens=9, stop=["x"], timeout_s=5, priority=2)
    frames = await socket.until("done")
    assert [(f["chunk_index"], f["text_delta"], f["is_final"]) for f in frames[:-1]] == [
        (0, "Hel", False),
        (1, "lo", False),
        (2, None, True),
    ]
    assert all(f["audio_data"] is None and "token_ids" not in f for f in frames[:-1])
    done = frames[-1]
    assert done["token_stats"] == {"cached": 4, "input": 8, "generated": 3, "total": 15}
    assert (done["stopped"], done["finish_reason"], done["message_count"]) == (False, "stop", 3)
    assert done["elapsed_ms"] >= 0 and done["epoch"] != filled["epoch"]

    text, _ = await socket.ask("two")
    assert text == "Hello"
    first = [{"role": "system", "content": "Be brief."}, user("one")]
    second = [*first, assistant("Hello"), user("two")]
    assert [request.messages for request in engine.requests] == [first, first, second, second]
    assert {request.session_id for request in engine.requests} == {"a/b~"}
    prefill, generate = engine.requests[:2]
    assert (prefill.params.max_new_tokens, prefill.stream) == (1, False)
    assert (generate.params.max_new_tokens, generate.params.temperature, generate.params.stop) == (9, 0, ("x",))
    assert (generate.priority, generate.deadline_s) == (2, generate.arrival_s + 5)
    assert all(request.token_ids is None and request.text is None for request in engine.requests)


async def test_pieces_of_a_turn_are_computed_as_they_come(app: FastAPI, engine: FakeEngineClient) -> None:
    ends = iter([ended("length", 1, prompt_tokens=6, cached_tokens=2), ended("length", 1, prompt_tokens=9)])
    engine.behaviour = talks(
        says("ok", end=ended()), lambda client, request: says("x", end=next(ends))(client, request)
    )
    socket = await Socket(app).open()
    first = await socket.prefill("one", is_last_chunk=False)
    assert (first["cached_tokens"], first["input_tokens"], first["message_count"]) == (2, 4, 1)
    last = await socket.prefill("two")
    assert (last["cached_tokens"], last["input_tokens"], last["message_count"]) == (3, 6, 2)
    socket.send("generate")
    done = (await socket.until("done"))[-1]
    assert done["token_stats"] == {"cached": 2, "input": 7, "generated": 2, "total": 11}
    assert [r.template_kwargs for r in engine.requests] == [{"add_generation_prompt": False}, {}, {}]
    assert engine.requests[1].messages == [user("one"), user("two")]


async def test_a_template_that_wants_the_rest_first(app: FastAPI, engine: FakeEngineClient) -> None:
    refusal = says(
        "", end=failed(400, "roles must alternate", state="rejected", param="messages", code="chat_template")
    )
    engine.behaviour = talks(says("ok"), refusal)
    socket = await Socket(app).open()
    first = await socket.prefill("one", is_last_chunk=False)
    assert (first["type"], first["cached_tokens"], first["input_tokens"]) == ("prefill_done", 0, 0)
    engine.behaviour = talks(says("ok"))
    socket.send("prefill", messages=[])
    assert (await socket.next())["message_count"] == 1
    socket.send("generate")
    assert (await socket.until("done"))[-1]["token_stats"]["cached"] == 4


async def test_a_template_that_refuses_the_whole_ends_the_turn(app: FastAPI, engine: FakeEngineClient) -> None:
    refusal = failed(400, "chat template: no", state="rejected", param="messages", code="chat_template")
    engine.behaviour = talks(says("ok"), says("", end=refusal))
    socket = await Socket(app).open()
    socket.send("prefill", messages=[user("one")])
    assert await error_of(socket) == ("chat_template", "messages")
    engine.behaviour = talks(says("ok"))
    assert (await socket.ask("two"))[0] == "ok"
    assert engine.requests[-1].messages == [user("two")]


async def test_deltas_that_wait_for_a_slow_client_are_one_chunk(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    request_id = await generating(engine, socket, return_token_ids=True)
    offered = socket.offered
    socket.taking.clear()
    engine.deliver(request_id, "a", token_ids=[1])
    await eventually(lambda: socket.offered == offered + 1)
    for text, token in (("b", 2), ("", 3), ("c", 4)):
        engine.deliver(request_id, text, token_ids=[token])
        await asyncio.sleep(0)
    socket.taking.set()
    chunks = [await socket.next(), await socket.next()]
    assert [(c["text_delta"], c["token_ids"]) for c in chunks] == [("a", [1]), ("bc", [2, 3, 4])]
    engine.deliver(request_id, token_ids=[5])
    assert (await socket.next())["token_ids"] == [5]
    engine.deliver(request_id, end=ended("length", 6))
    *_, final, done = await socket.until("done")
    assert (final["is_final"], done["finish_reason"], done["token_stats"]["generated"]) == (True, "length", 6)


async def test_resuming_an_answer(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("lo", end=ended(completion_tokens=4)))
    socket = await Socket(app).open()
    await socket.prefill("hi")
    socket.send("generate", resume={"token_ids": [5, 6], "chars": 3, "created": 1, "text": "Hel"})
    assert (await socket.until("done"))[-1]["token_stats"]["generated"] == 4
    assert (engine.requests[-1].resume_ids, engine.requests[-1].resume_chars) == ([5, 6], 3)
    await socket.prefill("more")
    assert engine.requests[-1].messages == [user("hi"), assistant("Hello"), user("more")]
    assert engine.requests[-1].resume_ids == []


@pytest.mark.parametrize(
    ("resume", "param"),
    [
        ({"token_ids": [5, 1000], "chars": 0}, "resume.token_ids"),
        ({"token_ids": [-1], "chars": 0}, "resume.token_ids"),
        ({"token_ids": ["5"], "chars": 0}, "resume.token_ids"),
        ({"token_ids": [5], "chars": -1, "text": ""}, "resume.chars"),
        ({"token_ids": [5], "chars": 4, "text": "Hel"}, "resume.chars"),
        ({"token_ids": [5], "chars": 3}, "resume.text"),
        ({"token_ids": [5]}, "resume.text"),
        ({"chars": 0}, "resume.token_ids"),
        ({"token_ids": [5], "chars": 0, "more": 1}, "resume.more"),
        ({"token_ids": [5] * 64, "chars": 0}, "resume.token_ids"),
    ],
)
async def test_a_wrong_resume(app: FastAPI, engine: FakeEngineClient, resume: Any, param: str) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.prefill("hi")
    socket.send("generate", resume=resume)
    assert (await error_of(socket))[1] in (param, "resume")
    socket.send("generate")
    assert (await socket.until("done"))[-1]["finish_reason"] == "stop"


# ---- stop, disconnect, failure --------------------------------------------------------------------------------


async def test_stop_keeps_what_was_sent(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    request_id = await generating(engine, socket)
    engine.deliver(request_id, "sent", token_ids=[1, 2])
    assert (await socket.next())["text_delta"] == "sent"
    socket.send("stop")
    engine.deliver(request_id, " too late", token_ids=[3])
    *chunks, done = await socket.until("done")
    assert [(c["text_delta"], c["is_final"]) for c in chunks] in ([(None, True)], [(" too late", True)])
    assert (done["stopped"], done["finish_reason"]) == (True, "abort")
    assert engine.aborted == [request_id]
    shown = "sent" + (chunks[0]["text_delta"] or "")
    assert done["token_stats"]["generated"] == (2 if shown == "sent" else 3)
    await socket.prefill("go on")
    assert engine.requests[-1].messages == [user("hi"), assistant(shown), user("go on")]


async def test_stop_with_deltas_behind_a_slow_client(app: FastAPI, engine: FakeEngineClient) -> None:
    """What was not sent when the stop came is not sent, and not part of the conversation."""
    socket = await Socket(app).open()
    request_id = await generating(engine, socket)
    offered = socket.offered
    socket.taking.clear()
    engine.deliver(request_id, "first", token_ids=[1])
    await eventually(lambda: socket.offered == offered + 1)
    engine.deliver(request_id, " second", token_ids=[2])
    socket.send("stop")
    await eventually(lambda: engine.aborted == [request_id])
    socket.taking.set()
    *chunks, done = await socket.until("done")
    assert [c["text_delta"] for c in chunks] == ["first", None]
    assert (done["stopped"], done["token_stats"]["generated"]) == (True, 1)
    await socket.prefill("go on")
    assert engine.requests[-1].messages[1] == assistant("first")  # type: ignore[index]


async def test_stop_before_any_text(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    await generating(engine, socket)
    socket.send("stop")
    *chunks, done = await socket.until("done")
    assert [(c["text_delta"], c["is_final"]) for c in chunks] == [(None, True)]
    assert (done["stopped"], done["token_stats"]["generated"], done["message_count"]) == (True, 0, 2)
    await socket.prefill("again")
    assert engine.requests[-1].messages == [user("hi"), assistant(""), user("again")]


async def test_stop_with_nothing_to_stop(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    socket.send("stop")
    await socket.prefill("hi")
    socket.send("stop")
    socket.send("generate")
    done = (await socket.until("done"))[-1]
    socket.send("stop")
    socket.send("stop")
    assert not done["stopped"]
    assert (await socket.ask("more"))[0] == "ok"


async def test_a_disconnect_takes_the_turn_back(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    epoch = (await socket.ask("one"))[1]["epoch"]
    request_id = await generating(engine, socket, "two")
    engine.deliver(request_id, "half", token_ids=[1])
    await socket.next()
    socket.disconnect()
    await socket.done()
    assert engine.aborted == [request_id] and engine.open_requests == 0

    engine.behaviour = talks(says("ok"))
    again = await Socket(app).open()
    assert (await again.prefill("two", epoch=epoch))["message_count"] == 3
    assert engine.requests[-1].messages == [user("one"), assistant("ok"), user("two")]


async def test_a_disconnect_in_a_first_turn_leaves_nothing(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    await generating(engine, socket)
    assert len(app.state.server.conversations) == 1
    socket.disconnect()
    await socket.done()
    assert len(app.state.server.conversations) == 0 and app.state.server.jobs == {}
    await eventually(lambda: engine.engine_queries == [("end_session", {"session_id": "s"})])


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_disconnect_before_done_was_sent(app: FastAPI, engine: FakeEngineClient, fresh: bool) -> None:
    """A client that never heard that its turn was done asks again."""
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    before = [] if fresh else [user("one"), assistant("ok")]
    if not fresh:
        await socket.ask("one")
    request_id = await generating(engine, socket, "two")
    socket.takes_no = "done"
    engine.deliver(request_id, "ok", end=ended())
    assert (await socket.next())["is_final"]
    await eventually(lambda: app.state.server.conversations.get("s").turn is None)
    socket.disconnect()
    await socket.done()
    engine.behaviour = talks(says("ok"))
    again = await Socket(app).open()
    await again.prefill("two")
    assert engine.requests[-1].messages == [*before, user("two")]


async def test_the_engine_dies_in_a_turn(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    epoch = (await socket.ask("one"))[1]["epoch"]
    request_id = await generating(engine, socket, "two")
    engine.deliver(request_id, "half", token_ids=[1])
    await socket.next()
    engine.deliver(request_id, end=failed(503, "the engine process died", code="engine_dead"))
    assert await error_of(socket) == ("engine_dead", None)
    engine.behaviour = talks(says("ok"))
    assert (await socket.prefill("three", epoch=epoch))["message_count"] == 3


async def test_a_full_queue_leaves_the_prefill(engine: FakeEngineClient) -> None:
    app = app_with(engine)
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.prefill("hi")
    admission = app.state.server.admission
    admission.reserve(FACTS.geometry["max_queue_size"] + FACTS.geometry["max_concurrent_requests"], 0, 1.0)
    socket.send("generate")
    frame = await socket.next()
    assert (frame["code"], frame["retry_after_s"]) == ("queue_full", 7.2)
    admission.free(0, FACTS.geometry["max_queue_size"] + FACTS.geometry["max_concurrent_requests"])
    socket.send("generate")
    assert (await socket.until("done"))[-1]["finish_reason"] == "stop"


async def test_what_the_engine_refuses_leaves_the_prefill(app: FastAPI, engine: FakeEngineClient) -> None:
    refusal = failed(400, "too long", state="rejected", param="max_new_tokens", code="context_length_exceeded")
    engine.behaviour = talks(says("", end=refusal))
    socket = await Socket(app).open()
    await socket.prefill("hi")
    socket.send("generate", max_new_tokens=1000)
    assert await error_of(socket) == ("context_length_exceeded", "max_new_tokens")
    engine.behaviour = talks(says("ok"))
    socket.send("generate")
    assert (await socket.until("done"))[-1]["message_count"] == 2


async def test_abort_ends_a_turn_with_an_error(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    request_id = await generating(engine, socket)
    status, _, _ = await Call(app, "/abort", {"request_id": request_id}).answer()
    assert status == 200
    assert await error_of(socket) == ("cancelled", None)


# ---- frames that are wrong ------------------------------------------------------------------------------------

WRONG = [
    ("{", "invalid_json", None),
    ("", "invalid_json", None),
    ("[1]", "invalid_json", None),
    ('"prefill"', "invalid_json", None),
    ("[" * 10_000, "invalid_json", None),
    ("{}", "unknown_type", "type"),
    ('{"type": 7}', "unknown_type", "type"),
    ('{"type": "Prefill"}', "unknown_type", "type"),
    ('{"type": "prefill"}', "missing_parameter", "messages"),
    ('{"type": "prefill", "messages": []}', "invalid_request", "messages"),
    ('{"type": "prefill", "messages": "hi"}', "invalid_request", "messages"),
    ('{"type": "prefill", "messages": [{"role": "king", "content": "x"}]}', "invalid_request", "messages"),
    ('{"type": "prefill", "messages": [{"role": "user"}]}', "invalid_request", "messages"),
    ('{"type": "prefill", "messages": [{"role": "user", "content": "x"}], "more": 1}', "unknown_parameter", "more"),
    (
        '{"type": "prefill", "messages": [{"role": "user", "content": "x"}], "is_last_chunk": 1}',
        "invalid_request",
        "is_last_chunk",
    ),
    (
        '{"type": "prefill", "messages": [{"role": "user", "content": "x"}], "clear_kv_cache": "yes"}',
        "invalid_request",
        "clear_kv_cache",
    ),
    ('{"type": "prefill", "messages": [{"role": "user", "content": "x"}], "epoch": 3}', "invalid_request", "epoch"),
    (
        '{"type": "prefill", "messages": [{"role": "user", "content": "x"}], "epoch": "other-1"}',
        "epoch_mismatch",
        "epoch",
    ),
    ('{"type": "generate"}', "wrong_order", None),
    ('{"type": "generate", "temprature": 1}', "unknown_parameter", "temprature"),
    ('{"type": "generate", "temperature": "hot"}', "invalid_request", "temperature"),
    ('{"type": "stop", "now": true}', "unknown_parameter", "now"),
    ('{"type": "close", "now": true}', "unknown_parameter", "now"),
]


@pytest.mark.parametrize(("text", "code", "param"), WRONG)
async def test_a_wrong_frame_is_an_error_and_no_more(
    app: FastAPI, engine: FakeEngineClient, text: str, code: str, param: str | None
) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    socket.send_text(text)
    found, named = await error_of(socket)
    assert (found, (named or "").partition("[")[0] or None) == (code, param)
    assert len(app.state.server.conversations) == 0
    assert (await socket.ask("hi"))[0] == "ok"


async def test_bytes_are_an_error(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    socket.send_bytes(b'{"type": "stop"}')
    assert await error_of(socket) == ("invalid_json", None)
    assert (await socket.ask("hi"))[0] == "ok"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"voice": "auto"}, "voice"),
        ({"speed": 1.5}, "speed"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"generate_audio": True}, None),  # nothing speaks here
    ],
)
async def test_a_wrong_generate_leaves_the_prefill(
    app: FastAPI, engine: FakeEngineClient, fields: dict[str, Any], param: str | None
) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.prefill("hi")
    socket.send("generate", **fields)
    assert (await error_of(socket))[1] == param
    socket.send("generate")
    assert (await socket.until("done"))[-1]["message_count"] == 2


async def test_double_prefill(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.prefill("one")
    for fields in ({}, {"is_last_chunk": False}):
        refused = await socket.prefill("two", **fields)
        assert (refused["type"], refused["code"]) == ("error", "double_prefill")
    socket.send("generate")
    assert (await socket.until("done"))[-1]["message_count"] == 2
    assert [request.messages for request in engine.requests] == [[user("one")]] * 2


async def test_prefill_and_generate_while_generating(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    request_id = await generating(engine, socket)
    socket.send("prefill", messages=[user("two")])
    socket.send("generate")
    assert [(await error_of(socket))[0] for _ in range(2)] == ["wrong_order"] * 2
    engine.deliver(request_id, "ok", end=ended())
    assert (await socket.until("done"))[-1]["message_count"] == 2


async def test_prefills_that_come_without_waiting(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    for content in ("one", "two"):
        socket.send("prefill", messages=[user(content)], is_last_chunk=False)
    socket.send("prefill", messages=[user("three")])
    counts = [(await socket.next())["message_count"] for _ in range(3)]
    assert counts == [1, 2, 3]
    assert [len(request.messages or ()) for request in engine.requests] == [1, 2, 3]


async def test_what_follows_a_broken_prefill_is_told(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"), says("", end=failed(500, "scripted", code="engine_error")))
    socket = await Socket(app).open()
    socket.send("prefill", messages=[user("one")], is_last_chunk=False)
    socket.send("prefill", messages=[user("two")])
    assert [(await error_of(socket))[0] for _ in range(2)] == ["engine_error", "wrong_order"]
    engine.behaviour = talks(says("ok"))
    assert (await socket.ask("hi"))[0] == "ok"
    assert engine.requests[-1].messages == [user("hi")]


async def test_a_large_frame_is_read_elsewhere(engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    app = app_with(engine, max_body_bytes=400_000)
    socket = await Socket(app).open()
    assert (await socket.prefill("x" * 200_000, is_last_chunk=False))["message_count"] == 1
    socket.send("prefill", messages=[user("y" * 200_001)])
    assert (await error_of(socket))[0] == "body_too_large"
    socket.send_text('{"type": "sing", "x": "' + "x" * 200_000 + '"}')
    assert (await error_of(socket))[0] == "unknown_type"
    app.state.server.readers.close()


async def test_ids_of_sessions(app: FastAPI) -> None:
    for session_id in ("x" * 257, "two words", "é"):
        socket = await Socket(app, session_id).open()
        assert await error_of(socket) == ("invalid_request", "session_id")
        assert await socket.closed() == 1008


# ---- sessions and their bounds --------------------------------------------------------------------------------


async def test_a_turn_belongs_to_its_connection(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    one, two = await Socket(app).open(), await Socket(app).open()
    await one.prefill("hi")
    two.send("prefill", messages=[user("me")])
    assert (await error_of(two))[0] == "session_busy"
    two.send("generate")
    assert (await error_of(two))[0] == "wrong_order"
    one.send("generate")
    await one.until("done")
    assert (await two.ask("me"))[1]["message_count"] == 4
    assert engine.requests[-1].messages == [user("hi"), assistant("ok"), user("me")]


async def test_epochs(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    first = (await socket.ask("one"))[1]["epoch"]
    second = (await socket.ask("two", epoch=first))[1]["epoch"]
    assert first.startswith(app.state.server.boot_id) and first != second
    stale = await socket.prefill("three", epoch=first)
    assert (stale["code"], stale["param"]) == ("epoch_mismatch", "epoch")
    assert (await socket.prefill("three", epoch=second, is_last_chunk=False))["epoch"] == second
    assert (await socket.prefill("four", epoch=first))["code"] == "epoch_mismatch"
    assert (await socket.prefill("four", epoch=second))["message_count"] == 6


async def test_clear_begins_anew(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.ask("one")
    assert (await socket.ask("two", clear_kv_cache=True))[1]["message_count"] == 2
    assert engine.engine_queries == [("end_session", {"session_id": "s"})]
    assert engine.requests[-1].messages == [user("two")]
    await socket.prefill("three", is_last_chunk=False)
    assert (await socket.prefill("four", clear_kv_cache=True))["param"] == "clear_kv_cache"


async def test_a_disconnect_takes_clearing_back(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.ask("one")
    await socket.prefill("two", clear_kv_cache=True)
    socket.disconnect()
    await socket.done()
    again = await Socket(app).open()
    assert (await again.prefill("three"))["message_count"] == 3


async def test_the_one_unused_for_longest_gives_way(engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    app = app_with(engine, max_sessions=2)
    engine.engine_answers["end_session"] = NotFoundError("no lease")
    a, b, c = [await Socket(app, name).open() for name in "abc"]
    for socket in (a, b, a):
        await socket.ask("hi")
    await c.ask("hi")
    assert {conversation.id for conversation in app.state.server.conversations} == {"a", "c"}
    assert engine.engine_queries == [("end_session", {"session_id": "b"})]
    await a.prefill("busy")
    await c.prefill("busy")
    full = await b.prefill("hi")
    assert (full["code"], full["retry_after_s"]) == ("queue_full", 7.2)
    c.send("generate")
    await c.until("done")
    assert (await b.prefill("hi"))["message_count"] == 1


async def test_one_session_at_a_time(engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    app = app_with(engine, max_sessions=1)
    a, b = await Socket(app, "a").open(), await Socket(app, "b").open()
    await a.prefill("hi")
    assert (await b.prefill("hi"))["code"] == "session_busy"
    a.send("generate")
    await a.until("done")
    assert (await b.ask("hi"))[1]["message_count"] == 2
    assert (await a.ask("hi", clear_kv_cache=True))[1]["message_count"] == 2  # it had given way
    asked = [op for op, _ in engine.engine_queries]
    assert asked[-2:] == ["end_session", "flush_cache"]


async def test_a_conversation_is_forgotten_when_its_time_is_over(engine: FakeEngineClient) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()
    query = engine.engine_query

    async def noting(op: str, **about: Any) -> dict[str, Any]:
        asked.put_nowait(op)
        return await query(op, **about)

    engine.engine_query = noting  # type: ignore[method-assign]
    engine.behaviour = talks(says("ok"))
    app = app_with(engine, {"session_ttl_s": 0.5})
    socket = await Socket(app).open()
    await socket.ask("hi")
    async with asyncio.timeout(PATIENCE_S):
        assert await asked.get() == "end_session"
    assert len(app.state.server.conversations) == 0
    assert (await socket.ask("hi"))[1]["message_count"] == 2


async def test_a_lease_that_ends_takes_no_new_turn_with_it(app: FastAPI, engine: FakeEngineClient) -> None:
    """Ending a lease cancels the session's requests, so the next turn's wait for it."""
    socket = await Socket(app).open()
    await generating(engine, socket)
    release = asyncio.Event()
    query = engine.engine_query

    async def slow(op: str, **about: Any) -> dict[str, Any]:
        await release.wait()
        return await query(op, **about)

    engine.engine_query = slow  # type: ignore[method-assign]
    socket.disconnect()
    await socket.done()
    count = len(engine.requests)
    again = await Socket(app).open()
    again.send("prefill", messages=[user("hi")])
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(engine.requests) == count
    release.set()
    assert (await again.next())["type"] == "prefill_done"


@pytest.mark.parametrize("how", ["setting", "engine"])
async def test_where_no_kv_is_kept(engine: FakeEngineClient, how: str) -> None:
    refusal = failed(400, "X-Session-ID: no", state="rejected", param="X-Session-ID")
    engine.behaviour = talks(
        says("ok", end=ended(prompt_tokens=2, cached_tokens=0, completion_tokens=1)), says("", end=refusal)
    )
    app = app_with(engine, {"retain": "none"} if how == "setting" else {})
    socket = await Socket(app).open()
    filled = await socket.prefill("one")
    assert (filled["cached_tokens"], filled["input_tokens"]) == (0, 2)
    socket.send("generate")
    done = (await socket.until("done"))[-1]
    assert done["token_stats"] == {"cached": 0, "input": 2, "generated": 1, "total": 3}
    await socket.ask("two")
    sent = [(request.stream, request.session_id) for request in engine.requests]
    assert sent == ([] if how == "setting" else [(False, "s")]) + [(True, None)] * 2
    assert [query.messages for query in engine.queries] == [
        [user("one")],
        [user("one"), assistant("ok"), user("two")],
    ]
    engine.text_answer = {"count": 64}
    assert (await socket.prefill("long"))["code"] == "context_length_exceeded"


# ---- over HTTP ------------------------------------------------------------------------------------------------


async def test_streaming_stop(app: FastAPI, engine: FakeEngineClient, http: httpx.AsyncClient) -> None:
    a, b = await Socket(app, "a").open(), await Socket(app, "b").open()
    await generating(engine, a)
    await generating(engine, b)
    assert (await http.post("/streaming/stop", json={"session_id": "a"})).json() == {"stopped": 1}
    assert (await a.until("done"))[-1]["stopped"]
    assert (await http.post("/streaming/stop", json={})).json() == {"stopped": 1}
    assert (await b.until("done"))[-1]["stopped"]
    assert (await http.post("/streaming/stop", json={"session_id": "b"})).json() == {"stopped": 0}
    assert (await http.post("/streaming/stop", json={"session_id": "c"})).status_code == 404
    await Socket(app, "c").open()
    assert (await http.post("/streaming/stop", json={"session_id": "c"})).json() == {"stopped": 0}


async def test_sessions_and_conversations_are_one_list(
    app: FastAPI, engine: FakeEngineClient, http: httpx.AsyncClient
) -> None:
    engine.engine_answers["sessions"] = {"sessions": [{"id": "http", "tokens": 5}, {"id": "a", "tokens": 9}]}
    engine.behaviour = talks(says("ok"))
    a, b = await Socket(app, "a").open(), await Socket(app, "b").open()
    epoch = (await a.ask("hi"))[1]["epoch"]
    await b.prefill("hi")
    listed = (await http.get("/v1/sessions")).json()["sessions"]
    assert listed[:2] == [
        {"id": "http", "tokens": 5},
        {"id": "a", "tokens": 9, "messages": 2, "epoch": epoch, "state": "idle"},
    ]
    assert (listed[2]["id"], listed[2]["tokens"], listed[2]["state"]) == ("b", 0, "prefilled")
    assert "weft_conversations 2.0" in (await http.get("/metrics")).text


@pytest.mark.parametrize("state", ["idle", "prefilled", "generating"])
async def test_ending_a_session_forgets_its_conversation(
    app: FastAPI, engine: FakeEngineClient, http: httpx.AsyncClient, state: str
) -> None:
    engine.behaviour = talks(says("ok"))
    engine.engine_answers["end_session"] = NotFoundError("no lease")
    socket = await Socket(app, "a").open()
    await socket.ask("one")
    if state == "prefilled":
        await socket.prefill("two")
    if state == "generating":
        await generating(engine, socket, "two")
    answer = (await http.delete("/v1/sessions/a")).json()
    assert answer == {"id": "a", "ended": False, "aborted": int(state == "generating")}
    if state != "idle":
        assert await error_of(socket) == ("cancelled", None)
    assert (await http.delete("/v1/sessions/a")).status_code == 404
    assert engine.open_requests == 0
    engine.behaviour = talks(says("ok"))
    assert (await socket.ask("new"))[1]["message_count"] == 2


async def test_requests_of_turns_are_listed(app: FastAPI, engine: FakeEngineClient, http: httpx.AsyncClient) -> None:
    socket = await Socket(app, "a").open()
    request_id = await generating(engine, socket)
    (record,) = (await http.get("/v1/requests")).json()["requests"]
    assert (record["id"], record["session_id"], record["state"]) == (request_id, "a", "queued")
    socket.send("stop")
    await socket.until("done")
    assert (await http.get("/v1/requests")).json()["requests"] == []


# ---- upgrade, draining ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "subprotocols", "let_in"),
    [
        ({"Authorization": "Bearer key-1"}, (), True),
        ({}, ("weft", "weft-api-key.key-1"), True),
        ({}, (), False),
        ({"Authorization": "Bearer key-2"}, (), False),
        ({"Authorization": "Basic key-1"}, (), False),
        ({}, ("weft", "weft-api-key.key-2"), False),
        ({}, ("weft", "key-1"), False),
        ({}, ("weft-api-key.",), False),
    ],
)
async def test_keys(
    engine: FakeEngineClient, headers: dict[str, str], subprotocols: tuple[str, ...], let_in: bool
) -> None:
    app = app_with(engine, api_keys=["key-0", "key-1"])
    socket = Socket(app, headers=headers, subprotocols=subprotocols)
    message = await socket.next_message()
    if let_in:
        assert message["type"] == "websocket.accept"
        assert message["subprotocol"] == ("weft" if subprotocols else None)
        return
    assert (message["type"], message["status"]) == ("websocket.http.response.start", 401)
    assert (b"www-authenticate", b"Bearer") in message["headers"]
    body = (await socket.next_message())["body"]
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    await socket.done()
    assert app.state.server.measures.rejections["unauthorised"] == 1


async def test_a_wrong_key_where_the_server_can_only_close(engine: FakeEngineClient) -> None:
    socket = Socket(app_with(engine, api_keys=["key"]), extensions={})
    assert (await socket.next_message())["type"] == "websocket.close"
    await socket.done()


async def test_close(app: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(app).open()
    request_id = await generating(engine, socket)
    socket.send("close")
    assert await socket.closed() == 1000
    assert engine.aborted == [request_id]


async def test_draining(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = talks(says("ok"))
    idle, busy, filled = [await Socket(app, name).open() for name in ("idle", "busy", "filled")]
    await idle.ask("hi")
    await filled.prefill("hi")
    request_id = await generating(engine, busy)
    app.state.draining = True
    drained = asyncio.ensure_future(app.state.sessions.drain())
    assert await idle.closed() == 1001
    late = await Socket(app, "late").open()
    assert await late.closed() == 1001
    engine.deliver(request_id, "ok", end=ended())
    assert (await busy.until("done"))[-1]["finish_reason"] == "stop"
    assert await busy.closed() == 1001
    assert not drained.done()
    engine.behaviour = talks(says("ok"))
    filled.send("generate")
    assert (await filled.until("done"))[-1]["finish_reason"] == "stop"
    assert await filled.closed() == 1001
    async with asyncio.timeout(PATIENCE_S):
        await drained
        await app.state.gate.wait_idle()


# ---- audio ----------------------------------------------------------------------------------------------------


@pytest.fixture
def speaker() -> FakeSpeaker:
    return FakeSpeaker()


@pytest.fixture
def speaking(engine: FakeEngineClient, speaker: FakeSpeaker) -> FastAPI:
    return create_app(engine, FACTS, settings(), speaker)  # type: ignore[arg-type]


def voice(samples: Any) -> str:
    return base64.b64encode(np.asarray(samples, "<f4").tobytes()).decode()


async def test_text_is_spoken(speaking: FastAPI, engine: FakeEngineClient, speaker: FakeSpeaker) -> None:
    engine.behaviour = talks(says_one_by_one("one ", "two ", "three"))
    socket = await Socket(speaking).open()
    await socket.prefill("hi")
    socket.send("generate", generate_audio=True, voice="en-us", speed=2)
    *chunks, done = await socket.until("done")
    assert [chunk["chunk_index"] for chunk in chunks] == list(range(7))
    assert [chunk["is_final"] for chunk in chunks] == [False] * 6 + [True]
    assert [chunk["text_delta"] for chunk in chunks if chunk["text_delta"]] == ["one ", "two ", "three"]
    audio = [chunk for chunk in chunks if chunk["audio_data"]]
    assert all((c["text_delta"], c["audio_sample_rate"], c["duration_ms"]) == (None, 24000, 10) for c in audio)
    sound = [np.frombuffer(base64.b64decode(chunk["audio_data"]), "<f4") for chunk in audio]
    assert [round(float(samples[0]), 3) for samples in sound] == [0.1, 0.2, 0.3]
    assert (speaker.begun, speaker.said) == ([("en-us", 2.0)], ["one", "two", "three"])
    assert done["finish_reason"] == "stop" and speaking.state.speech.used == 0


async def test_text_does_not_wait_for_audio(speaking: FastAPI, engine: FakeEngineClient, speaker: FakeSpeaker) -> None:
    speaker.gates[0] = threading.Event()
    engine.behaviour = talks(says_one_by_one("one ", "two"))
    socket = await Socket(speaking).open()
    await socket.prefill("hi")
    socket.send("generate", generate_audio=True)
    assert [(await socket.next())["text_delta"] for _ in range(2)] == ["one ", "two"]
    speaker.gates[0].set()
    *chunks, _ = await socket.until("done")
    assert [bool(chunk["audio_data"]) for chunk in chunks] == [True, True, False]


async def test_speech_that_fails_ends_the_audio_only(
    speaking: FastAPI, engine: FakeEngineClient, speaker: FakeSpeaker
) -> None:
    speaker.failures[0] = EngineError("no voice", code="speech_failed")
    socket = await Socket(speaking).open()
    request_id = await generating(engine, socket, generate_audio=True)
    engine.deliver(request_id, "one two ", token_ids=[1])
    frames = [await socket.next(), await socket.next()]
    assert [(f["type"], f.get("code"), f.get("text_delta")) for f in frames] == [
        ("chunk", None, "one two "),
        ("error", "speech_failed", None),
    ]
    engine.deliver(request_id, "three", end=ended())
    *chunks, done = await socket.until("done")
    assert [(c["text_delta"], c["is_final"]) for c in chunks] == [("three", False), (None, True)]
    assert (done["stopped"], done["message_count"]) == (False, 2)


async def test_stop_ends_audio(speaking: FastAPI, engine: FakeEngineClient, speaker: FakeSpeaker) -> None:
    speaker.gates[1] = threading.Event()
    engine.behaviour = talks(says("one two three"))
    socket = await Socket(speaking).open()
    await socket.prefill("hi")
    socket.send("generate", generate_audio=True)
    frames = [await socket.next(), await socket.next()]
    assert sorted(bool(frame["audio_data"]) for frame in frames) == [False, True]
    socket.send("stop")
    *chunks, done = await socket.until("done")
    assert [(c["audio_data"], c["is_final"]) for c in chunks] == [(None, True)]
    assert (done["stopped"], done["finish_reason"]) == (True, "abort")
    speaker.gates[1].set()
    await socket.prefill("go on")
    assert engine.requests[-1].messages[1] == assistant("one two three")  # type: ignore[index]


async def test_a_disconnect_gives_the_place_at_the_desk_back(speaking: FastAPI, engine: FakeEngineClient) -> None:
    socket = await Socket(speaking).open()
    await generating(engine, socket, generate_audio=True)
    assert speaking.state.speech.used == 1
    socket.disconnect()
    await socket.done()
    assert speaking.state.speech.used == 0


async def test_a_voice_to_imitate(speaking: FastAPI, engine: FakeEngineClient, speaker: FakeSpeaker) -> None:
    engine.behaviour = talks(says("ok"))
    socket = await Socket(speaking).open()
    await socket.prefill("hi", tts_ref_audio_base64=voice([0.5, -0.5]))
    socket.send("generate", generate_audio=True)
    assert await error_of(socket) == ("invalid_request", "tts_ref_audio_base64")
    speaker.clones = True
    socket.send("generate", generate_audio=True)
    await socket.until("done")
    assert speaker.references[0] is not None and speaker.references[0].tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    "value", ["", "x", "!!!!", voice([1.0])[:-1], base64.b64encode(b"12345").decode(), voice([np.nan]), 5]
)
async def test_a_wrong_voice(speaking: FastAPI, value: Any) -> None:
    socket = await Socket(speaking).open()
    refused = await socket.prefill("hi", tts_ref_audio_base64=value)
    assert (refused["type"], refused["param"]) == ("error", "tts_ref_audio_base64")


def test_a_voice_that_is_too_long() -> None:
    from weft.server.values import voice_sample

    longest = voice_sample(voice(np.zeros(30 * 16_000)))
    assert longest is not None and len(longest) == 30 * 16_000
    with pytest.raises(InvalidRequestError, match="at most 30 s"):
        voice_sample(voice(np.zeros(30 * 16_000 + 1)))


def test_the_new_fields_of_a_request_are_left_out_where_they_say_nothing() -> None:
    request = TextRequest([1], SamplingParams())
    assert b"resume" not in msgspec.msgpack.encode(request)
    request.resume_ids, request.resume_chars = [5], 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=TextRequest) == request


async def test_a_prefill_that_nothing_follows(engine: FakeEngineClient) -> None:
    """It does not keep its place for ever."""
    app = app_with(engine, {"session_ttl_s": 0.05})
    engine.behaviour = talks(says("ok"))
    socket = await Socket(app).open()
    await socket.prefill("hi")
    assert (await error_of(socket))[0] == "timeout"
    assert not list(app.state.server.conversations)
    assert (await socket.prefill("hi"))["message_count"] == 1
