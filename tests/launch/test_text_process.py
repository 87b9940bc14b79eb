"""`TextProcess` in a thread, over real sockets; the test plays the API and the engine, and holds up the tokenizer."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from weft.config.settings import Settings
from weft.core.sampling import SamplingParams
from weft.engine.text_worker import TextWorker
from weft.ipc.messages import (
    Abort,
    End,
    Finish,
    Heartbeat,
    QueryReply,
    Ready,
    Submit,
    TextBatch,
    TextDelta,
    TextQuery,
    TextRequest,
    TokenBatch,
    TokenOutput,
    decode_to_api,
    decode_to_engine,
)
from weft.ipc.sockets import Endpoints, Inbox, Outbox
from weft.launch import text_process
from weft.launch.text_process import TextProcess

PATIENCE_S = 10.0


class HeldUp:
    """Stands before `TextWorker.prepare`: requests whose text says so wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.prepared: list[int] = []
        prepare = TextWorker.prepare

        def held(worker: TextWorker, request: TextRequest) -> list[Submit]:
            self.prepared += request.request_ids
            if (request.text or "").startswith("wait"):
                self.begun.set()
                assert self.let_go.wait(PATIENCE_S)
            if (request.text or "").startswith("break"):
                raise ZeroDivisionError
            return prepare(worker, request)

        monkeypatch.setattr(TextWorker, "prepare", held)


class Rig:
    """The other processes' ends of all sockets."""

    def __init__(self, folder: Path, context: zmq.Context[Any]) -> None:
        endpoints = Endpoints(folder)
        self.api = Inbox(context, endpoints.api, decode_to_api)
        self.engine = Inbox(context, endpoints.engine, decode_to_engine)
        self._text = Outbox(context, endpoints.text(0))
        self._from_api: list[Any] = []
        self._from_engine: list[Any] = []

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._text.send(message)

    def to_api(self, kind: type) -> Any:
        """The next message of this kind to the API process; others are passed over."""
        return self._next(self.api, self._from_api, kind)

    def to_engine(self) -> Any:
        return self._next(self.engine, self._from_engine, object)

    def _next(self, inbox: Inbox[Any], kept: list[Any], kind: type) -> Any:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            while kept:
                message = kept.pop(0)
                if isinstance(message, kind):
                    return message
            kept.extend(inbox.receive(PATIENCE_S))
        raise AssertionError(f"no {kind.__name__}")

    def deltas(self) -> list[TextDelta]:
        return self.to_api(TextBatch).deltas

    def flush(self, request_id: int) -> list[Any]:
        """Everything that the engine is sent before a new short request reaches it."""
        self.send(TextRequest([request_id], SamplingParams(), text="x"))
        messages = []
        while not (messages and isinstance(messages[-1], Submit) and messages[-1].request_id == request_id):
            messages.append(self.to_engine())
        return messages[:-1]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    return HeldUp(monkeypatch)


@pytest.fixture
def rig(tmp_path: Path, held: HeldUp) -> Iterator[Rig]:
    context: zmq.Context[Any] = zmq.Context()
    rig = Rig(tmp_path, context)

    def run() -> None:
        with contextlib.suppress(msgspec.ValidationError):
            TextProcess(Settings(), Endpoints(tmp_path), 0, context).run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield rig
    held.let_go.set()
    rig.flush(10**6)  # its threads have nothing left to do
    rig.send(Ready("nobody"))  # no message for a text process: it raises
    thread.join(PATIENCE_S)
    context.destroy(linger=0)


def request(*ids: int, text: str = "x", **fields: Any) -> TextRequest:
    return TextRequest(list(ids), SamplingParams(), text=text, **fields)


def states(deltas: list[TextDelta]) -> list[tuple[int, str | None]]:
    return [(delta.request_id, delta.end.state if delta.end else None) for delta in deltas]


# ---- cancelling -------------------------------------------------------------------------------------------------


def test_what_is_being_tokenized_ends_at_once_and_is_never_submitted(rig: Rig, held: HeldUp) -> None:
    rig.send(request(1, 2, text="wait"))
    assert held.begun.wait(PATIENCE_S)
    rig.send(Abort([2]))
    (delta,) = rig.deltas()
    assert delta.end is not None and delta.end.error is not None
    assert (delta.request_id, delta.end.state, delta.end.error.http_status) == (2, "cancelled", 499)
    rig.send(Abort([1]))
    assert states(rig.deltas()) == [(1, "cancelled")]
    held.let_go.set()
    assert rig.flush(3) == []
    rig.send(Abort([1, 2]), TokenBatch([TokenOutput(3, [5], end=End("completed", "length"))]))
    assert states(rig.deltas()) == [(3, "completed")]  # and no second end for the others


def test_what_waits_for_the_tokenizer_is_skipped(rig: Rig, held: HeldUp) -> None:
    rig.send(request(1, text="wait"))
    assert held.begun.wait(PATIENCE_S)
    rig.send(request(2), request(3), Abort([2]))
    assert states(rig.deltas()) == [(2, "cancelled")]
    held.let_go.set()
    assert [rig.to_engine().request_id, rig.to_engine().request_id] == [1, 3]
    assert held.prepared == [1, 3]


def test_an_abort_follows_a_submit_that_had_left(rig: Rig) -> None:
    rig.send(request(1))
    assert rig.to_engine().request_id == 1
    rig.send(Abort([1, 99], sent_s=12.5))
    abort = rig.to_engine()
    assert isinstance(abort, Abort)
    assert (abort.request_ids, abort.sent_s) == ([1], 12.5)
    rig.send(TokenBatch([TokenOutput(1, end=End("cancelled"))]))
    assert states(rig.deltas()) == [(1, "cancelled")]  # the engine's, and the only one


def test_an_abort_races_with_tokenizing(rig: Rig) -> None:
    """Whatever comes first: either a Submit, then an Abort behind it, and no end from here; or an end from here."""
    for request_id in range(1, 201):
        rig.send(request(request_id), Abort([request_id]))
    sent: dict[int, list[str]] = {}
    for message in rig.flush(999):
        if isinstance(message, Submit):
            sent[message.request_id] = ["submit"]
        else:
            (request_id,) = message.request_ids
            sent[request_id].append("abort")  # KeyError: before its Submit
    ended = 200 - len(sent)
    cancelled: list[int] = []
    while len(cancelled) < ended:
        cancelled += [delta.request_id for delta in rig.deltas()]
    assert sorted([*cancelled, *sent]) == list(range(1, 201))
    assert all(kinds == ["submit", "abort"] for kinds in sent.values())


# ---- tokenizing -------------------------------------------------------------------------------------------------


def test_short_prompts_do_not_wait_behind_long_ones(rig: Rig, held: HeldUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_process, "SHORT_CHARS", 100)
    rig.send(request(1, text="wait" + "x" * 100))
    assert held.begun.wait(PATIENCE_S)
    rig.send(request(2))
    assert rig.to_engine().request_id == 2
    held.let_go.set()
    assert rig.to_engine().request_id == 1


def test_tokens_become_text_while_a_prompt_is_tokenized(rig: Rig, held: HeldUp) -> None:
    rig.send(request(1, stream=True))
    rig.to_engine()
    rig.send(request(2, text="wait"))
    assert held.begun.wait(PATIENCE_S)
    rig.send(TokenBatch([TokenOutput(1, [40])]))
    (delta,) = rig.deltas()
    assert delta.token_ids == [40]


@pytest.mark.parametrize(
    ("broken", "state", "status"),
    [
        ({"text": "break"}, "failed", 500),
        ({"messages": [{"role": "user", "content": "x"}], "template_kwargs": {"messages": []}}, "rejected", 400),
    ],
)
def test_a_broken_prompt_ends_its_request_only(rig: Rig, broken: dict[str, Any], state: str, status: int) -> None:
    rig.send(TextRequest([1], SamplingParams(), **broken))
    (delta,) = rig.deltas()
    assert delta.end is not None and delta.end.error is not None
    assert (delta.end.state, delta.end.error.http_status) == (state, status)
    assert rig.flush(2) == []


def test_a_prompt_that_is_far_too_long_is_refused_early(rig: Rig) -> None:
    rig.send(request(1, text="one two three " * 10_000))
    (delta,) = rig.deltas()
    assert delta.end is not None and delta.end.error is not None
    assert delta.end.error.code == "context_length_exceeded"
    assert "at most 2047" in delta.end.error.message
    assert "140000 characters" in delta.end.error.message


def test_questions(rig: Rig) -> None:
    rig.send(TextQuery(1, "tokenize", text="Hello"), TextQuery(2, "detokenize", token_ids=[10**6]))
    reply = rig.to_api(QueryReply)
    assert (reply.call_id, reply.result["count"]) == (1, len(json.loads(reply.result["tokens"])))
    reply = rig.to_api(QueryReply)
    assert (reply.call_id, reply.error.http_status) == (2, 400)


# ---- text -------------------------------------------------------------------------------------------------------


def test_what_waits_becomes_one_delta(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    rig = Rig(tmp_path, context)
    process = TextProcess(Settings(), Endpoints(tmp_path), 0, context)
    process._worker.prepare(request(1, stream=True))
    process._worker.prepare(TextRequest([2], SamplingParams(stop=("zzz",)), text="x"))
    process._push([TokenOutput(i, [token]) for token in (40, 41, 42) for i in (1, 2)])
    (delta,) = rig.deltas()
    assert delta.token_ids == [40, 41, 42]
    process._push([TokenOutput(1, [43]), TokenOutput(1, [44], end=End("completed", "length")), TokenOutput(99, [1])])
    (delta,) = rig.deltas()
    assert (delta.token_ids, delta.end.state if delta.end else None) == ([43, 44], "completed")
    context.destroy(linger=0)


def test_heartbeats_while_nothing_happens(rig: Rig) -> None:
    assert [rig.to_api(Heartbeat).role, rig.to_api(Heartbeat).role] == ["text0", "text0"]


def test_a_stop_string_tells_the_engine(rig: Rig) -> None:
    rig.send(TextRequest([1], SamplingParams(stop=("e",), max_new_tokens=9), text="x"))
    rig.to_engine()
    rig.send(TextQuery(5, "tokenize", text="e e e", add_special_tokens=False))
    tokens = json.loads(rig.to_api(QueryReply).result["tokens"])
    rig.send(TokenBatch([TokenOutput(1, tokens)]))
    assert isinstance(rig.to_engine(), Finish)
