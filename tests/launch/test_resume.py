"""A stream that its client leaves goes on in another worker: real processes, from the ids in the comments alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.launch.worker import Worker
from weft.gateway.events import EventReader

TOKENS = 40
HEADER = {"X-Weft-Gateway": "id=70, seed=8"}
FIELDS: dict[str, Any] = {"stream": True, "temperature": 0.9, "ignore_eos": True, "min_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": FIELDS
    | {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": TOKENS,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": FIELDS | {"prompt": "Hi", "max_tokens": TOKENS, "stop": ["never said", "nor\nthis"]},
    "/generate": {
        "text": "Hi",
        "stream": True,
        "sampling_params": {"temperature": 0.9, "ignore_eos": True, "max_new_tokens": TOKENS},
    },
}


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    """A slow one, so that a cut comes in the middle, and another one."""
    with Worker("--set", "backend.fake.tokens_per_s=100") as first, Worker() as second:
        yield first, second


def read(response: httpx.Response, events: int | None = None) -> tuple[list[Any], EventReader]:
    """The events with data, until there are so many or the stream ends, as a gateway's client sees them."""
    reader = EventReader()
    seen: list[Any] = []
    for data in response.iter_bytes():
        for event in filter(None, reader.feed(data).decode().split("\n\n")):
            assert event.startswith("data: ")
            seen.append(event.removeprefix("data: "))
        if events is not None and len(seen) >= events:
            break
    return [json.loads(event) for event in seen if event != "[DONE]"], reader


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event.get("choices", [event])]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("events", [1, 9, 20])
def test_a_stream_goes_on_in_another_worker(workers: tuple[Worker, Worker], path: str, events: int) -> None:
    first, second = workers
    body = BODIES[path]
    with second.http.stream("POST", path, json=body, headers=HEADER) as response:
        whole, whole_reader = read(response)
    with first.http.stream("POST", path, json=body, headers=HEADER) as response:
        begun, reader = read(response, events)
        assert response.headers["x-request-id"] == "70"
        assert response.headers["x-weft-worker-request-id"] != "70"
    ids = reader.token_ids()
    assert 0 < len(ids) < TOKENS
    created = begun[0].get("created")
    resume = {"token_ids": ids, "created": created}
    with second.http.stream("POST", path, json=body | {"weft_resume": resume}, headers=HEADER) as response:
        rest, rest_reader = read(response)
    assert rest_reader.done
    assert ids + rest_reader.token_ids() == whole_reader.token_ids()
    assert text_of(begun) + text_of(rest) == text_of(whole)
    assert {event.get("created") for event in rest} == {created}
    assert [e["usage"]["completion_tokens"] for e in rest if e.get("usage")] == (
        [TOKENS] if path == "/v1/chat/completions" else []
    )
    roles = [c for e in [*begun, *rest] for c in e.get("choices", []) if "role" in c.get("delta", {})]
    assert len(roles) == (path == "/v1/chat/completions")


def test_a_complete_answer_ends_at_once(workers: tuple[Worker, Worker]) -> None:
    _, second = workers
    path, body = "/v1/completions", BODIES["/v1/completions"]
    with second.http.stream("POST", path, json=body, headers=HEADER) as response:
        whole, reader = read(response)
    text = text_of(whole)
    for fields, reason, chars in (({}, "length", None), ({"stop": text[-9:-4]}, "stop", 0)):
        resume = {"token_ids": reader.token_ids(), "chars": chars}
        sent = body | {"weft_resume": resume} | fields
        with second.http.stream("POST", path, json=sent, headers=HEADER) as response:
            (event,), rest = read(response)
        assert rest.done
        assert event["choices"][0]["finish_reason"] == reason
        assert text_of([event]) == ("" if chars is None else text[: text.index(text[-9:-4])])


def test_what_only_the_engine_or_the_text_process_knows_is_refused(workers: tuple[Worker, Worker]) -> None:
    _, second = workers
    for resume, message in (
        ({"token_ids": [5, 6], "chars": 99}, "chars: 99 is not allowed"),
        ({"token_ids": [5] * 2047}, "KV cache"),
    ):
        body = {"text": "Hi there, you all", "stream": True, "weft_resume": resume}
        response = second.http.post("/generate", json=body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
