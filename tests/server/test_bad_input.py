"""Every bad input is a 400 that names the field, nothing of it reaches the engine, and the server goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.fakes import FACTS, FakeEngineClient, ended
from weft.config.settings import HttpSettings, Settings
from weft.core.errors import InvalidRequestError
from weft.server import create_app
from weft.server.bodies import MAX_COMMAS, parse_body
from weft.server.schemas import ChatRequest, CompletionRequest

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, fields]}


BAD_SAMPLING: list[tuple[Any, str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ["x"] * 5000}, "stop"),
    ({"stop": [1] * 5000}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"stop_token_ids": 1}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "much"}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
]

BAD_OPENAI: list[tuple[Any, str]] = [
    *BAD_SAMPLING,
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "seed": 2**64 - 1}, "seed"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": -1}, "timeout_s"),
    ({"priority": "high"}, "priority"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"weft": "yes"}, "weft"),
    ({"frobnicate": None}, "frobnicate"),
    ({"x" * 5000: 1}, "x" * 60 + "…"),
]

BAD_CHAT: list[tuple[Any, str]] = [
    *BAD_OPENAI,
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": HI * 10_001}, "messages"),
    (message(role="robot", content="x"), "messages[1].role"),
    (message(role=["user"], content="x"), "messages[1].role"),
    (message(content="x"), "messages[1].role"),
    (message(role="user", content=None), "messages[1].content"),
    (message(role="user"), "messages[1].content"),
    (message(role="user", content=5), "messages[1].content"),
    (message(role="user", content=["x"]), "messages[1].content[0].type"),
    (
        message(role="user", content=[{"type": "text", "text": "x"}, {"type": "video_url", "video_url": {"url": "x"}}]),
        "messages[1].content[1].type",
    ),
    (message(role="user", content=[{"type": "text", "text": 5}]), "messages[1].content[0]"),
    (message(role="user", content="x", mood="good"), "messages[1].mood"),
    (message(role="user", content="x", name=5), "messages[1].name"),
    (message(role="assistant", content="x", function_call={"name": "f"}), "messages[1].function_call"),
    (message(role="user", content="x", tool_calls=[{}]), "messages[1].tool_calls"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": []}, "functions"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"metadata": {}}, "metadata"),
    ({"prompt": "hi"}, "prompt"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": json.loads('{"a":' * 40 + "1" + "}" * 40)}, "chat_template_kwargs"),
]

BAD_TEXT: list[tuple[Any, str]] = [
    *BAD_OPENAI,
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 1000]}, "prompt"),
    ({"prompt": [[1], [10**30]]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a"] * 200, "n": 2}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": HI}, "messages"),
]

BAD_GENERATE: list[tuple[Any, str]] = [
    *(({"sampling_params": fields}, name) for fields, name in BAD_SAMPLING if "stop" not in name),
    ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"logprobs": 1}}, "sampling_params.logprobs"),
    ({"sampling_params": []}, "sampling_params"),
    ({"text": ""}, "text"),
    ({"text": 5}, "text"),
    ({"text": None}, "text"),
    ({"input_ids": [1]}, "input_ids"),
    ({"text": None, "input_ids": []}, "input_ids"),
    ({"text": None, "input_ids": [1000]}, "input_ids"),
    ({"text": None, "input_ids": "abc"}, "input_ids"),
    ({"return_logprob": True}, "return_logprob"),
]

CASES = [
    *((CHAT, {"messages": HI}, fields, param) for fields, param in BAD_CHAT),
    *((TEXT, {"prompt": "hi"}, fields, param) for fields, param in BAD_TEXT),
    *((GENERATE, {"text": "hi"}, fields, param) for fields, param in BAD_GENERATE),
    ("/tokenize", {}, {}, "prompt"),
    ("/tokenize", {"prompt": "a"}, {"text": "b"}, "text"),
    ("/tokenize", {"messages": HI}, {"add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a"}, {"add_generation_prompt": True}, "messages"),
    ("/detokenize", {}, {}, "tokens"),
    ("/detokenize", {"tokens": [1000]}, {}, "tokens"),
    ("/detokenize", {"tokens": "ab"}, {}, "tokens"),
    ("/abort", {}, {}, "request_id"),
    ("/abort", {"request_id": 1}, {"all": True}, "request_id"),
    ("/abort", {"request_id": "seventeen"}, {}, "request_id"),
    ("/abort", {"request_id": True}, {}, "request_id"),
]


async def test_bad_values_name_their_field(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    for path, good, fields, param in CASES:
        shown = f"{path} {str(fields)[:100]}"
        response = await http.post(path, content=json.dumps(good | fields))
        assert response.status_code == 400, shown
        error = response.json()["error"]
        named = param.removeprefix("sampling_params.") if path == GENERATE else param
        assert (error["param"] or "").removeprefix("sampling_params.") == named, f"{shown}: {error}"
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 400, shown
        assert named in error["message"], shown
    assert engine.requests == []
    assert (await http.post(TEXT, json={"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "hi",}',
        b'{"prompt": NaN}',
        b"[1, 2]",
        b'"hi"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":[' + b"1," * MAX_COMMAS + b"1,1]}",
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE, "/tokenize", "/detokenize", "/abort"])
async def test_bad_json(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    response = await http.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] is None


def test_bad_json_tells_the_position() -> None:
    with pytest.raises(InvalidRequestError, match="byte 16"):
        parse_body(b'{"prompt": "hi",}', CompletionRequest, 64)


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
async def test_unknown_model(http: httpx.AsyncClient, path: str) -> None:
    body = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}, GENERATE: {"text": "hi"}}[path]
    response = await http.post(path, json=body | {"model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


async def test_priority_needs_its_setting() -> None:
    app = create_app(FakeEngineClient(), FACTS, Settings())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
        response = await http.post(TEXT, json={"prompt": "hi", "priority": 1})
        assert response.json()["error"]["param"] == "priority"
        assert (await http.post(TEXT, json={"prompt": "hi", "priority": 0})).status_code == 200


async def test_chat_without_a_template() -> None:
    facts = replace(FACTS, has_chat_template=False)
    app = create_app(FakeEngineClient(), facts, Settings())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
        response = await http.post(CHAT, json={"messages": HI})
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]


async def test_one_answer_always_fits_the_queue() -> None:
    engine = FakeEngineClient(lambda client, request: client.deliver(request.request_ids[0], "x", end=ended()))
    app = create_app(engine, FACTS, Settings(http=HttpSettings(max_queue_size=1)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
        assert (await http.post(TEXT, json={"prompt": "hi"})).status_code == 200
        assert (await http.post(TEXT, json={"prompt": "hi", "n": 2})).json()["error"]["param"] == "n"
        response = await http.post(TEXT, json={"prompt": ["a", "b"]})
        assert response.json()["error"]["param"] == "prompt"


def test_huge_bodies_are_judged() -> None:
    """Work that grows faster than the body would run into the suite's time limit."""
    many_keys = b"{" + b",".join(b'"key%d":1' % i for i in range(500_000)) + b"}"
    many_messages = b'{"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 200_000) + b"]}"
    long_text = json.dumps({"prompt": "x" * 30_000_000}).encode()
    for body, schema in ((many_keys, ChatRequest), (many_messages, ChatRequest)):
        with pytest.raises(InvalidRequestError):
            parse_body(body, schema, 64)
    assert parse_body(long_text, CompletionRequest, 64).prompt[0].text is not None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": [[1], [1] * 64]}, "prompt"),
        (GENERATE, {"input_ids": [1] * 64}, "input_ids"),
        ("/detokenize", {"tokens": [1] * 64}, "tokens"),
    ],
)
async def test_more_ids_than_the_context_holds(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = (await http.post(path, json=body)).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "has 64 tokens" in error["message"] and "at most 63" in error["message"]
    assert engine.requests == []
