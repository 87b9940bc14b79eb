"""/v1/chat/completions: what reaches the engine, and what the client gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fakes import FakeEngineClient, ended, says, says_one_by_one
from weft.core.sampling import SamplingParams
from weft.ipc.messages import CacheMissInfo

HI = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


def events(text: str) -> list[Any]:
    """The JSON of every event of a stream that ends well."""
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def test_document(http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json={"model": "weft-demo", "messages": HI})
    document = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "1"
    assert document.pop("created") > 0
    assert document == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "weft-demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_every_parameter_reaches_the_engine(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            *HI,
        ],
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100},
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 3,
        "min_tokens": 1,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -2,
        "timeout_s": 2.5,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "somebody",
    }
    assert (await http.post(PATH, json=body)).status_code == 200
    request = engine.requests[0]
    assert request.params == SamplingParams(
        max_new_tokens=9,
        min_tokens=1,
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={7: -100.0},
        seed=11,
        logprobs=3,
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        include_stop=True,
        skip_special_tokens=False,
    )
    assert request.messages == [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        *HI,
    ]
    assert request.template_kwargs == {"enable_thinking": False, "add_generation_prompt": False}
    assert request.request_ids == [1, 2]
    assert request.priority == -2
    assert request.deadline_s == pytest.approx(request.arrival_s + 2.5)
    assert not request.stream


async def test_null_means_default(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    schema = (await http.get("/openapi.json")).json()["components"]["schemas"]["ChatRequest"]["properties"]
    body = {name: None for name in schema} | {"messages": HI}
    response = await http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    assert engine.requests[0].params == SamplingParams()
    assert engine.requests[0].deadline_s is None
    assert engine.requests[0].template_kwargs == {}


async def test_neutral_values_of_what_we_do_not_have(http: httpx.AsyncClient) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "echo": False,
    }
    assert (await http.post(PATH, json={"messages": HI} | neutral)).status_code == 200


async def test_stream(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says_one_by_one("Hello", " world")
    body = {"messages": HI, "stream": True, "n": 2, "stream_options": {"include_usage": True}, "weft": True}
    *chunks, last = events((await http.post(PATH, json=body)).text)
    deltas: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        assert (chunk["id"], chunk["object"], chunk["usage"]) == ("chatcmpl-1", "chat.completion.chunk", None)
        (choice,) = chunk["choices"]
        deltas[choice["index"]].append((choice["delta"], choice["finish_reason"]))
    first = {"role": "assistant", "content": "Hello"}
    expected = [(first, None), ({"content": " world"}, None), ({}, "stop")]
    assert deltas == {0: expected, 1: expected}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens"] == 5
    times = {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3}
    assert last["weft"] == times | {"retractions": 0, "miss": None, "route": None}


async def test_what_waits_shares_a_chunk(http: httpx.AsyncClient) -> None:
    (chunk,) = events((await http.post(PATH, json={"messages": HI, "stream": True})).text)
    (choice,) = chunk["choices"]
    assert choice["delta"] == {"role": "assistant", "content": "Hello world"}
    assert choice["finish_reason"] == "stop"


async def test_weft_tells_retractions_and_the_miss(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    miss = CacheMissInfo("diverged", 12)
    engine.behaviour = says("x", end=ended(retractions=2, miss=miss))
    document = (await http.post(PATH, json={"messages": HI, "weft": True, "n": 2})).json()
    assert document["weft"]["retractions"] == 4
    assert document["weft"]["miss"] == {"reason": "diverged", "at_token": 12}


async def test_stream_without_extras_has_no_usage(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says_one_by_one("Hello", " world")
    chunks = events((await http.post(PATH, json={"messages": HI, "stream": True})).text)
    assert len(chunks) == 3
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(http: httpx.AsyncClient, engine: FakeEngineClient, stream: bool) -> None:
    engine.behaviour = says("é", end=ended("length"))
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await http.post(PATH, json=body)
    choice = (events(response.text)[0] if stream else response.json())["choices"][0]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
                    {"token": "other", "logprob": -9999.0, "bytes": [*b"other"]},
                ],
            }
        ]
    }


async def test_logprobs_of_nothing_are_an_empty_list(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says()
    response = await http.post(PATH, json={"messages": HI, "logprobs": True})
    assert response.json()["choices"][0]["logprobs"] == {"content": []}


async def test_what_stopped_it(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = says("x", end=ended("stop", stop="\n"))
    choice = (await http.post(PATH, json={"messages": HI, "stop": "\n"})).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n")
    chunks = events((await http.post(PATH, json={"messages": HI, "stop": "\n", "stream": True})).text)
    assert chunks[-1]["choices"][0]["stop_reason"] == "\n"


async def test_the_log_names_request_and_user(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "weft.server"):
        await http.post(PATH, json={"messages": HI, "user": "a\nb"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "weft.server"]
    assert line.startswith("request 1: POST /v1/chat/completions 200, prompt 5, cached 3, completion 2 tokens")
    assert line.endswith("user 'a\\nb'")
