"""Streaming sessions on real processes, over real WebSockets: on the fake engine, and with the demo model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.launch.worker import END_LIMIT_S, Worker

SLOW = ("--set", "backend.fake.tokens_per_s=200")


class Talk:
    """A client of one session."""

    def __init__(self, worker: Worker, session_id: str = "s", **options: Any) -> None:
        url = f"{worker.url.replace('http', 'ws', 1)}/ws/streaming/{session_id}"
        self._connecting = connect(url, open_timeout=END_LIMIT_S, proxy=None, **options)

    def __enter__(self) -> Talk:
        self.ws = self._connecting.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._connecting.__exit__(*exc)

    def send(self, kind: str, **fields: Any) -> None:
        self.ws.send(json.dumps({"type": kind, **fields}))

    def next(self) -> dict[str, Any]:
        return json.loads(self.ws.recv(END_LIMIT_S))

    def until(self, kind: str) -> list[dict[str, Any]]:
        frames = [self.next()]
        while frames[-1]["type"] != kind:
            frames.append(self.next())
        return frames

    def prefill(self, *contents: str, **fields: Any) -> dict[str, Any]:
        self.send("prefill", messages=[{"role": "user", "content": content} for content in contents], **fields)
        return self.next()

    def answer(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        self.send("generate", **{"temperature": 0, **fields})
        *chunks, done = self.until("done")
        assert [chunk["is_final"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        return "".join(chunk["text_delta"] or "" for chunk in chunks), done

    def ask(self, content: str, **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """A turn: its text, its `prefill_done`, its `done`."""
        filled = self.prefill(content)
        assert filled["type"] == "prefill_done", filled
        text, done = self.answer(**fields)
        return text, filled, done

    def closed_with(self) -> tuple[list[str], int]:
        """The types of the frames that still come, and the code with which the server closes the connection."""
        kinds: list[str] = []
        try:
            while True:
                kinds.append(self.next()["type"])
        except ConnectionClosed as error:
            assert error.rcvd is not None
            return kinds, error.rcvd.code


def cold(worker: Worker, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The answer to a conversation of which nothing is in the cache."""
    for session in worker.http.get("/v1/sessions").json()["sessions"]:
        worker.http.delete(f"/v1/sessions/{session['id']}")
    worker.http.post("/flush_cache").raise_for_status()
    body = {"messages": messages, "temperature": 0, **fields}
    answer = worker.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return answer["choices"][0]["message"]["content"]


def histories(turns: list[tuple[str, str]]) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """The conversation before each answer, and that answer."""
    messages: list[dict[str, Any]] = []
    for question, text in turns:
        messages = [*messages, {"role": "user", "content": question}]
        yield messages, text
        messages = [*messages, {"role": "assistant", "content": text}]


def check_clean(worker: Worker) -> None:
    requests = worker.stats()["requests"]
    assert (requests["queued"], requests["pending"], requests["processing"]) == (0, 0, 0)


# ---- with the fake engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake() -> Iterator[Worker]:
    with Worker(*SLOW, "--set", "http.max_queue_size=256") as running:
        yield running


def test_an_answer_over_the_cache_is_the_cold_one(fake: Worker) -> None:
    with Talk(fake, "equal") as talk:
        turns = [(text, talk.ask(text, max_new_tokens=8)[0]) for text in ("one", "two  ", "<|im_end|>", "four")]
    for messages, text in histories(turns):
        assert cold(fake, messages, max_tokens=8) == text


def test_stop_and_the_next_turn(fake: Worker) -> None:
    with Talk(fake, "stop") as talk:
        talk.prefill("hi")
        talk.send("generate", max_new_tokens=1500, ignore_eos=True, temperature=0)
        chunks = [talk.next(), talk.next()]
        talk.send("stop")
        *rest, done = talk.until("done")
        shown = "".join(chunk["text_delta"] or "" for chunk in chunks + rest)
        assert (done["stopped"], done["finish_reason"], done["message_count"]) == (True, "abort", 2)
        assert 0 < done["token_stats"]["generated"] < 1500
        text, filled, _ = talk.ask("go on", max_new_tokens=8)
        assert filled["message_count"] == 3
    (_, (messages, _)) = histories([("hi", shown), ("go on", text)])
    assert cold(fake, messages, max_tokens=8) == text
    check_clean(fake)


def test_a_disconnect_in_an_answer(fake: Worker) -> None:
    with Talk(fake, "gone") as talk:
        first, _, done = talk.ask("one", max_new_tokens=4)
        talk.prefill("two")
        talk.send("generate", max_new_tokens=1500, ignore_eos=True)
        talk.next()
        talk.ws.socket.shutdown(2)
    with Talk(fake, "gone") as talk:
        filled = talk.prefill("two")
        while filled.get("code") == "session_busy":  # this connection was quicker than the end of the other
            filled = talk.prefill("two")
        assert (filled["message_count"], filled["epoch"]) == (3, done["epoch"])
        text, _ = talk.answer(max_new_tokens=4)
    (_, (messages, _)) = histories([("one", first), ("two", text)])
    assert cold(fake, messages, max_tokens=4) == text
    check_clean(fake)


@pytest.mark.parametrize(
    "garbage", ["", "{", "null", "[]", "7", '"x"', b"\x00\xff", '{"type": "\\ud800"}', "[" * 100_000, "{}" * 1000]
)
def test_garbage(fake: Worker, garbage: str | bytes) -> None:
    with Talk(fake, "garbage") as talk:
        talk.ws.send(garbage)
        assert talk.next()["code"] in ("invalid_json", "unknown_type")
        talk.prefill("hi")
        talk.ws.send(garbage)
        assert talk.next()["type"] == "error"
        assert talk.prefill("again")["code"] == "double_prefill"
        text, done = talk.answer(max_new_tokens=4)
        assert (len(text) > 0, done["message_count"]) == (True, 2)
        fake.http.delete("/v1/sessions/garbage").raise_for_status()


def test_a_frame_that_is_too_large_ends_the_connection() -> None:
    with Worker("--set", "http.max_body_bytes=100000") as worker, Talk(worker) as talk:
        talk.ws.send("x" * 100_001)
        assert talk.closed_with() == ([], 1009)
        with Talk(worker) as again:
            assert again.prefill("hi")["type"] == "prefill_done"


def test_fifty_sessions_at_once(fake: Worker) -> None:
    def lead(number: int) -> list[tuple[str, str]]:
        with Talk(fake, f"many-{number}") as talk:
            questions = [f"I am number {number}", "and now?", f"{number} again"]
            return [(question, talk.ask(question, max_new_tokens=6)[0]) for question in questions]

    with ThreadPoolExecutor(50) as pool:
        all_turns = list(pool.map(lead, range(50)))
    listed = fake.http.get("/v1/sessions").json()["sessions"]
    many = [session for session in listed if session["id"].startswith("many-")]
    assert len(many) == 50 and all((s["messages"], s["state"]) == (6, "idle") for s in many)
    for turns in all_turns[::10]:
        *_, (messages, text) = histories(turns)
        assert cold(fake, messages, max_tokens=6) == text
    check_clean(fake)


def test_streaming_stop_over_http(fake: Worker) -> None:
    with Talk(fake, "by-http") as talk:
        talk.prefill("hi")
        talk.send("generate", max_new_tokens=1500, ignore_eos=True)
        talk.next()
        assert fake.http.post("/streaming/stop", json={"session_id": "by-http"}).json() == {"stopped": 1}
        assert talk.until("done")[-1]["stopped"]


def test_close_is_clean(fake: Worker) -> None:
    with Talk(fake, "close") as talk:
        talk.send("close")
        assert talk.closed_with() == ([], 1000)


def test_the_engine_is_killed_in_an_answer() -> None:
    with Worker(*SLOW, "--set", "engine.restart=true") as worker, Talk(worker) as talk:
        first, _, done = talk.ask("one", max_new_tokens=4)
        talk.prefill("two")
        talk.send("generate", max_new_tokens=1500, ignore_eos=True)
        talk.next()
        os.kill(worker.child("engine"), signal.SIGKILL)
        assert talk.until("error")[-1]["code"] == "engine_dead"
        filled = talk.prefill("two", epoch=done["epoch"])
        while filled.get("code") in ("loading", "unavailable"):
            filled = talk.prefill("two", epoch=done["epoch"])
        assert (filled["message_count"], filled["cached_tokens"]) == (3, 0)
        text, _ = talk.answer(max_new_tokens=4)
        (_, (messages, _)) = histories([("one", first), ("two", text)])
        assert cold(worker, messages, max_tokens=4) == text


def test_one_session_at_a_time() -> None:
    with Worker(*SLOW, "--set", "http.max_sessions=1") as worker, Talk(worker, "a") as a, Talk(worker, "b") as b:
        first, _, _ = a.ask("one", max_new_tokens=4)
        a.prefill("two")
        assert b.prefill("mine")["code"] == "session_busy"
        a.answer(max_new_tokens=4)
        assert b.ask("mine", max_new_tokens=4)[1]["message_count"] == 1
        filled = b.prefill("mine", clear_kv_cache=True)
        assert (filled["cached_tokens"], filled["message_count"]) == (0, 1)
        b.answer(max_new_tokens=4)
        assert a.ask("one", max_new_tokens=4)[0] == first


def test_where_no_kv_is_kept() -> None:
    with Worker("--set", "kv_cache.retain=none") as worker, Talk(worker) as talk:
        turns = []
        for question in ("one", "two"):
            text, filled, done = talk.ask(question, max_new_tokens=4)
            assert filled["cached_tokens"] == 0 and filled["input_tokens"] > 0
            assert done["token_stats"]["total"] == filled["input_tokens"] + 4
            turns.append((question, text))
        for messages, text in histories(turns):
            assert cold(worker, messages, max_tokens=4) == text


def test_a_drain_lets_a_turn_finish() -> None:
    with Worker(*SLOW) as worker, Talk(worker, "busy") as busy, Talk(worker, "idle") as idle:
        idle.ask("hi", max_new_tokens=2)
        busy.prefill("hi")
        busy.send("generate", max_new_tokens=100, ignore_eos=True)
        busy.next()
        worker.terminate()
        assert idle.closed_with() == ([], 1001)
        kinds, code = busy.closed_with()
        assert (kinds[-2:], code) == (["chunk", "done"], 1001)
        assert worker.wait() == 0


def test_a_drain_ends_what_takes_too_long() -> None:
    with Worker(*SLOW, "--set", "http.drain_s=0.2") as worker, Talk(worker) as talk:
        talk.prefill("hi")
        talk.send("generate", max_new_tokens=1500, ignore_eos=True)
        talk.next()
        worker.terminate()
        assert talk.until("error")[-1]["code"] == "draining"
        assert talk.closed_with() == ([], 1001)
        assert worker.wait() == 0


def test_keys() -> None:
    with Worker("--set", 'http.api_keys=["key-1"]') as worker:
        for options in ({}, {"additional_headers": {"Authorization": "Bearer key-2"}}, {"subprotocols": ["weft"]}):
            with pytest.raises(InvalidStatus) as refused, Talk(worker, **options):
                pass
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
        for options in (
            {"additional_headers": {"Authorization": "Bearer key-1"}},
            {"subprotocols": ["weft", "weft-api-key.key-1"]},
        ):
            with Talk(worker, **options) as talk:
                assert talk.prefill("hi")["type"] == "prefill_done"


# ---- with the demo model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[Worker]:
    pytest.importorskip("torch", reason="needs the torch engine")
    with Worker("--dtype", "float32", "--set", "http.request_timeout_s=null", backend="torch") as running:
        yield running


def test_the_second_turn_reuses_the_whole_first(demo: Worker) -> None:
    with Talk(demo, "two-turns") as talk:
        _, _, first = talk.ask("My name is Mira.")
        text, filled, second = talk.ask("What is my name?")
    assert "Mira" in text
    # All of the first turn is reused but its end token, whose KV was never needed.
    assert filled["cached_tokens"] == first["token_stats"]["total"] - 1
    assert second["token_stats"]["cached"] == filled["cached_tokens"]
    assert second["finish_reason"] == "stop"


def test_ten_turns_equal_their_cold_answers(demo: Worker) -> None:
    questions = [
        "My name is Mira.",
        "What is 2 plus 5?",
        "What is my name?",
        "Repeat: sun, moon, star.",
        "What is the capital of France?",
        "Count from 1 to 5.",
        "What is my name?",
        "What is 3 plus 4?",
        "Repeat: red, green.",
        "What is my name?",
    ]
    with Talk(demo, "ten") as talk:
        turns = []
        for question in questions:
            text, filled, _ = talk.ask(question, max_new_tokens=48)
            assert question == questions[0] or filled["cached_tokens"] > filled["input_tokens"] / 2
            turns.append((question, text))
    recalled = [text for question, text in turns if question == "What is my name?"]
    assert all("Mira" in text for text in recalled), recalled
    for messages, text in histories(turns):
        assert cold(demo, messages, max_tokens=48) == text


def test_a_stopped_answer_is_remembered_as_shown(demo: Worker) -> None:
    with Talk(demo, "stopped") as talk:
        first, _, _ = talk.ask("My name is Mira.")
        talk.prefill("Count from 1 to 20.")
        talk.send("generate", temperature=0)
        chunk = talk.next()
        talk.send("stop")
        *rest, done = talk.until("done")
        shown = "".join(c["text_delta"] or "" for c in [chunk, *rest])
        text, _, _ = talk.ask("What is my name?")
    assert done["message_count"] == 4
    turns = [("My name is Mira.", first), ("Count from 1 to 20.", shown), ("What is my name?", text)]
    *_, (messages, _) = histories(turns)
    assert cold(demo, messages) == text
