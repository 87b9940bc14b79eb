"""/v1/completions and /generate."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fakes import FakeEngineClient, ended, logprob, says, says_one_by_one
from tests.server.test_chat import events
from weft.core.sampling import SamplingParams
from weft.ipc.messages import TextLogprob
from weft.server.wire import TextLogprobs

PATH = "/v1/completions"


async def test_defaults_are_openais(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    document = (await http.post(PATH, json={"prompt": "Say"})).json()
    assert engine.requests[0].params == SamplingParams(max_new_tokens=16)
    assert engine.requests[0].text == "Say"
    assert document["id"] == "cmpl-1"
    assert document["object"] == "text_completion"
    assert document["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1, 2], [3]], [(None, [1, 2]), (None, [3])]),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_forms_of_prompts(
    http: httpx.AsyncClient, engine: FakeEngineClient, prompt: Any, sent: list[Any], stream: bool
) -> None:
    response = await http.post(PATH, json={"prompt": prompt, "n": 2, "best_of": 2, "stream": stream})
    assert response.status_code == 200
    assert [(request.text, request.token_ids) for request in engine.requests] == sent
    assert [len(request.request_ids) for request in engine.requests] == [2] * len(sent)
    if stream:
        indices = {choice["index"] for chunk in events(response.text) for choice in chunk["choices"]}
    else:
        indices = {choice["index"] for choice in response.json()["choices"]}
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == 5 * len(sent)
        assert usage["completion_tokens"] == 4 * len(sent)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * len(sent)
    assert indices == set(range(2 * len(sent)))


async def test_logprobs_in_the_old_form(http: httpx.AsyncClient) -> None:
    choice = (await http.post(PATH, json={"prompt": "Say", "logprobs": 1})).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hello": -0.5, "other": -9999.0}, {" world": -0.5, "other": -9999.0}],
        "text_offset": [0, 5],
    }


async def test_echo(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    choice = (await http.post(PATH, json={"prompt": "Say", "echo": True})).json()["choices"][0]
    assert choice["text"] == "SayHello world"
    assert engine.requests[0].echo
    choice = (await http.post(PATH, json={"prompt": [1], "echo": True})).json()["choices"][0]
    assert choice["text"] == "decoded promptHello world"


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_with_logprobs(http: httpx.AsyncClient, engine: FakeEngineClient, stream: bool) -> None:
    body = {"prompt": "abé", "echo": True, "logprobs": 0, "stream": stream}
    response = await http.post(PATH, json=body)
    assert engine.requests[0].params.prompt_logprobs == 0
    if stream:
        parts = [chunk["choices"][0] for chunk in events(response.text)]
        lists = [part["logprobs"] for part in parts if part["logprobs"]]
        tokens, offsets = (sum((part[name] for part in lists), []) for name in ("tokens", "text_offset"))
        scores = sum((part["token_logprobs"] for part in lists), [])
        text = "".join(part["text"] for part in parts)
    else:
        (choice,) = response.json()["choices"]
        tokens, offsets, scores = (choice["logprobs"][name] for name in ("tokens", "text_offset", "token_logprobs"))
        text = choice["text"]
    assert text == "abéHello world"
    assert tokens == ["a", "b", "é", "Hello", " world"]
    assert scores == [None, -0.5, -0.5, -0.5, -0.5]
    assert offsets == [0, 1, 2, 3, 8]


async def test_scoring_without_generating(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says("Hello", end=ended("stop", completion_tokens=1))
    body = {"prompt": "abé", "echo": True, "logprobs": 0, "max_tokens": 0}
    document = (await http.post(PATH, json=body)).json()
    (choice,) = document["choices"]
    assert choice["text"] == "abé"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "é"]
    assert document["usage"]["completion_tokens"] == 0
    assert engine.requests[0].params.max_new_tokens == 1


def test_offsets_count_a_character_of_several_tokens_once() -> None:
    half = [TextLogprob("\ufffd", part, -1.0, []) for part in (b"\xc3", b"\xa9")]
    lists = TextLogprobs().take([logprob("a"), *half, logprob("b")])
    assert lists["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"a", b"\xe5", b"\x8f", b"\xb8", b"b"],
        [b"a\xe5", b"\x8f\xb8x", b"b"],
        [b"a", b"\xe5", b"vim", b"b"],
        [b"\xe5\x8f\xb8", b"a\xc3", b"\xa9", b"\xc3\xa9"],
    ],
)
def test_offsets_point_at_the_characters_of_the_text(pieces: list[bytes]) -> None:
    entries = [TextLogprob(piece.decode("utf-8", "replace"), piece, -1.0, []) for piece in pieces]
    text = b"".join(pieces).decode("utf-8", "replace")
    offsets = TextLogprobs().take(entries)["text_offset"]
    for piece, offset in zip(pieces, offsets, strict=True):
        whole = piece.decode("utf-8", "ignore")  # what a token has of whole characters stands at or after its offset
        assert text.find(whole, offset) - offset in (0, 1)
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(text) - 1


def test_a_first_token_without_text() -> None:
    lists = TextLogprobs().take_prompt("ab", [None, logprob("a"), logprob("b")])  # <bos> is not in the text
    assert (lists["tokens"], lists["text_offset"]) == (["", "a", "b"], [0, 0, 1])
    assert TextLogprobs().take_prompt("a", [None])["tokens"] == ["a"]


async def test_generate(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    body = {"text": "Say", "sampling_params": {"max_new_tokens": 3, "include_stop": True, "stop": "x"}}
    document = (await http.post("/generate", json=body)).json()
    assert engine.requests[0].params == SamplingParams(max_new_tokens=3, include_stop=True, stop=("x",))
    assert document["meta_info"].pop("e2e_latency_s") >= 0
    assert document == {
        "text": "Hello world",
        "output_ids": [100, 101],
        "meta_info": {
            "id": "gen-1",
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "cached_tokens": 3,
        },
    }


async def test_generate_from_lists(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    answers = (await http.post("/generate", json={"input_ids": [[1, 2], [3]]})).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["gen-1", "gen-2"]
    assert [request.token_ids for request in engine.requests] == [[1, 2], [3]]
    assert isinstance((await http.post("/generate", json={"text": ["one"]})).json(), list)


async def test_generate_streams_new_text(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says_one_by_one("Hello", " world")
    parts = events((await http.post("/generate", json={"text": "Say", "stream": True})).text)
    assert [(part["text"], part["output_ids"]) for part in parts] == [("Hello", [100]), (" world", [101]), ("", [])]
    assert parts[0]["meta_info"] == {"id": "gen-1", "finish_reason": None}
    assert parts[-1]["meta_info"]["finish_reason"] == "stop"
    many = events((await http.post("/generate", json={"text": ["a", "b"], "stream": True})).text)
    assert {part["index"] for part in many} == {0, 1}
