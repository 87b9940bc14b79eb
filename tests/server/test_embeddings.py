"""/v1/embeddings: forms of inputs and vectors, every refusal, one input's error, and many inputs in few places."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import EMBEDDER, FACTS, FakeEngineClient, embeds, ended, failed, settings, silent
from weft.config.settings import HttpSettings, Settings
from weft.core.sampling import SamplingParams
from weft.ipc.messages import End, TextRequest
from weft.server import create_app
from weft.server.bodies import INLINE_BYTES

PATH = "/v1/embeddings"
ONE, OTHER = [0.5, 0.5, -0.5, 0.5], [0.0, 0.6, 0.8, 0.0]


@pytest.fixture(autouse=True)
def vectors(engine: FakeEngineClient) -> None:
    engine.behaviour = embeds(ONE, OTHER)


def app_of(engine: FakeEngineClient, *, priority: bool = False, **http: Any) -> FastAPI:
    given = settings(**http) if priority else Settings(http=HttpSettings(**http))
    return create_app(engine, EMBEDDER, given)  # type: ignore[arg-type]


def error(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()["error"]
    return body


# ---- answers -----------------------------------------------------------------------------------------------------


async def test_openais_form(embedder: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    response = await embedder.post(PATH, json={"input": "hello", "model": "weft-demo", "user": "me"})
    assert response.status_code == 200 and response.headers["x-request-id"] == "1"
    assert response.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": ONE}],
        "model": "weft-demo",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    (request,) = engine.requests
    assert request.params == SamplingParams(embed=True) and request.request_ids == [1] and not request.stream


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("a", [("a", None)]),
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1, 2], [3]], [(None, [1, 2]), (None, [3])]),
    ],
)
async def test_forms_of_inputs(
    embedder: httpx.AsyncClient, engine: FakeEngineClient, given: Any, sent: list[Any]
) -> None:
    document = (await embedder.post(PATH, json={"input": given})).json()
    assert [(request.text, request.token_ids) for request in engine.requests] == sent
    assert [item["index"] for item in document["data"]] == list(range(len(sent)))
    assert [item["embedding"] for item in document["data"]] == [ONE, np.float32(OTHER).tolist()][: len(sent)]
    assert document["usage"]["total_tokens"] == 5 * len(sent)


async def test_base64_is_little_endian_float32(embedder: httpx.AsyncClient) -> None:
    document = (await embedder.post(PATH, json={"input": ["a", "b"], "encoding_format": "base64"})).json()
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in document["data"]]
    np.testing.assert_array_equal(decoded, np.array([ONE, OTHER], dtype=np.float32))


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_fewer_dimensions(embedder: httpx.AsyncClient, form: str) -> None:
    body = {"input": ["a", "b"], "dimensions": 3, "encoding_format": form}
    items = (await embedder.post(PATH, json=body)).json()["data"]
    vectors = [i["embedding"] for i in items]
    if form == "base64":
        vectors = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in vectors]
    np.testing.assert_allclose(vectors, [[3**-0.5, 3**-0.5, -(3**-0.5)], [0, 0.6, 0.8]], rtol=1e-6)
    assert (await embedder.post(PATH, json=body | {"dimensions": 4})).status_code == 200


async def test_order_is_that_of_the_inputs(engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app_of(engine), PATH, {"input": ["a", "b", "c"]})
    await engine.submitted.wait()
    for request_id, value in ((3, 3.0), (1, 1.0), (2, 2.0)):
        engine.deliver(request_id, embedding=np.full(4, value, "<f4").tobytes(), end=ended(completion_tokens=0))
    _, _, body = await call.answer()
    assert [item["embedding"][0] for item in json.loads(body)["data"]] == [1.0, 2.0, 3.0]


async def test_a_large_body(embedder: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    text = "x" * INLINE_BYTES
    assert (await embedder.post(PATH, json={"input": [text, "b"]})).status_code == 200
    assert [request.text for request in engine.requests] == [text, "b"]


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input: this field is needed"),
        ({"input": None}, "input", "text, token ids"),
        ({"input": 5}, "input", "input: 5 is not allowed"),
        ({"input": {}}, "input", "text, token ids"),
        ({"input": ""}, "input", "input: the input is empty"),
        ({"input": []}, "input", "input: the input is empty"),
        ({"input": ["a", "b", "c", ""]}, "input", "input[3]: the input is empty"),
        ({"input": ["a", 5]}, "input", "input[1]"),
        ({"input": [5, "a"]}, "input", "'a' is not allowed"),
        ({"input": [[1], []]}, "input", "input[1]: the input is empty"),
        ({"input": [[1], [2], "a"]}, "input", "input[2]: 'a' is not allowed"),
        ({"input": [[1], [2.5]]}, "input", "input[1]: 2.5 is not allowed"),
        ({"input": [[1], [-1]]}, "input", "input[1]: -1 is not allowed"),
        ({"input": [[1], [1000]]}, "input", "input[1]: token id 1000 is not in the vocabulary (allowed: 0 to 999)"),
        ({"input": [1000]}, "input", "input: token id 1000 is not in the vocabulary"),
        ({"input": [[1]] * 3 + [[1] * 65]}, "input", "input[3]: it has 65 tokens, but at most 64 are allowed"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs' is not allowed (allowed: at most 2048)"),
        ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"dimensions": 5}, "dimensions", "dimensions: 5 is not allowed (this model's embeddings have 1 to 4)"),
        ({"dimensions": 2.5}, "dimensions", "2.5"),
        ({"dimensions": "2"}, "dimensions", "'2'"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"stream": True}, "stream", "not supported"),
        ({"n": 2}, "n", "not a parameter"),
        ({"temperature": 0}, "temperature", "not a parameter"),
        ({"task": "query"}, "task", "not a parameter"),
        ({"timeout_s": 0}, "timeout_s", "greater than 0"),
        ({"priority": "high"}, "priority", "'high'"),
        ({"user": 5}, "user", "5"),
    ],
)
async def test_refusals_name_field_value_and_what_is_allowed(
    embedder: httpx.AsyncClient, engine: FakeEngineClient, body: dict[str, Any], param: str, words: str
) -> None:
    given = body if "input" in body or not body else {"input": "hello"} | body
    response = await embedder.post(PATH, json=given)
    assert response.status_code == 400
    assert error(response)["param"] == param and words in error(response)["message"], response.text
    assert not engine.requests
    assert (await embedder.post(PATH, json={"input": [1] * 64})).status_code == 200


@pytest.mark.parametrize("header", ["X-Session-ID", "X-Session-TTL"])
async def test_there_are_no_sessions(embedder: httpx.AsyncClient, engine: FakeEngineClient, header: str) -> None:
    response = await embedder.post(PATH, json={"input": "a"}, headers={header: "1"})
    assert (response.status_code, error(response)["param"]) == (400, header)


async def test_another_model_and_priorities_that_are_off(engine: FakeEngineClient) -> None:
    transport = httpx.ASGITransport(app_of(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as http:
        response = await http.post(PATH, json={"input": "a", "model": "other"})
        assert (response.status_code, error(response)["code"]) == (404, "model_not_found")
        response = await http.post(PATH, json={"input": "a", "priority": 1})
        assert (response.status_code, error(response)["param"]) == (400, "priority")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_an_embedding_model_generates_nothing(
    embedder: httpx.AsyncClient, engine: FakeEngineClient, path: str, body: dict[str, Any]
) -> None:
    response = await embedder.post(path, json=body)
    assert (response.status_code, error(response)["code"]) == (400, "unsupported_endpoint")
    assert "use POST /v1/embeddings" in error(response)["message"] and not engine.requests


async def test_a_model_that_generates_makes_no_embeddings(http: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    response = await http.post(PATH, json={"input": "a"})
    assert (response.status_code, error(response)["code"]) == (400, "unsupported_endpoint")
    assert "use POST /v1/chat/completions" in error(response)["message"] and not engine.requests


async def test_an_engine_without_any_says_404(engine: FakeEngineClient) -> None:
    app = create_app(engine, replace(FACTS, backend="torch"), settings())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
        response = await http.post(PATH, json={"input": "a"})
    assert response.status_code == 404
    assert error(response)["message"].startswith("embeddings: the torch engine does not provide them")


# ---- one input's error, and the client's going -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status", "param", "message"),
    [
        (failed(500, "not finite"), 500, "input", "input[1]: not finite"),
        (failed(400, "prompt: too long", state="rejected", param="prompt"), 400, "input", "input[1]: too long"),
        (failed(400, "a lone surrogate", state="rejected"), 400, "input", "input[1]: a lone surrogate"),
        (failed(408, "too late", state="timeout"), 408, None, "too late"),
        (failed(429, "full", state="rejected", retry_after_s=3.0), 429, None, "full"),
    ],
)
async def test_one_inputs_error_is_that_of_all(
    engine: FakeEngineClient, end: End, status: int, param: str | None, message: str
) -> None:
    engine.behaviour = silent
    app = app_of(engine)
    call = Call(app, PATH, {"input": ["a", "b", "c"]})
    await engine.submitted.wait()
    engine.deliver(2, end=end)
    got, _, body = await call.answer()
    told = json.loads(body)["error"]
    assert (got, told["param"], told["message"]) == (status, param, message)
    assert engine.aborted == [1, 3] and not engine.open_requests
    assert app.state.server.admission.used == 0 and not app.state.server.jobs


async def test_a_cut_vector_without_a_direction(embedder: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    engine.behaviour = embeds(ONE, OTHER)
    response = await embedder.post(PATH, json={"input": ["a", "b"], "dimensions": 1})
    assert (response.status_code, error(response)["message"]) == (
        500,
        "input[1]: the model's embedding of this input is zero",
    )


async def test_a_client_that_goes_away(engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    app = app_of(engine)
    call = Call(app, PATH, {"input": ["a", "b"]})
    await engine.submitted.wait()
    call.disconnect()
    await call.done()
    assert engine.aborted == [1, 2] and app.state.server.admission.used == 0


async def test_a_full_server_says_when_to_come_back(engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    app = app_of(engine, max_queue_size=256)
    calls = [Call(app, PATH, {"input": ["x"] * 128}) for _ in range(2)] + [Call(app, PATH, {"input": ["x"] * 64})]
    while engine.open_requests < 256 + 64:
        await asyncio.sleep(0)
    status, headers, _ = await Call(app, PATH, {"input": "a"}).answer()
    assert (status, headers["retry-after"]) == (429, "8")
    for call in calls:
        call.disconnect()
        await call.done()
    assert app.state.server.admission.used == 0


# ---- many inputs -------------------------------------------------------------------------------------------------


class Window:
    """Takes requests and answers one when told to."""

    def __init__(self, engine: FakeEngineClient) -> None:
        self.engine = engine
        self.open: list[TextRequest] = []
        self.most = 0
        engine.behaviour = self

    def __call__(self, client: FakeEngineClient, request: TextRequest) -> None:
        self.open.append(request)
        self.most = max(self.most, len(self.open))

    def answer(self) -> None:
        request = self.open.pop(0)
        vector = np.full(4, float(request.text or 0), "<f4").tobytes()
        self.engine.deliver(request.request_ids[0], embedding=vector, end=ended(completion_tokens=0))


async def test_many_inputs_take_few_places(engine: FakeEngineClient) -> None:
    window = Window(engine)
    app = app_of(engine, max_queue_size=20)
    call = Call(app, PATH, {"input": [str(i) for i in range(2048)]})
    await engine.submitted.wait()
    admission = app.state.server.admission
    assert admission.used == 20
    while window.open:
        assert admission.used == len(window.open)
        window.answer()
    status, _, body = await call.answer()
    assert status == 200 and window.most == 20 and admission.used == 0
    document = json.loads(body)
    assert [item["embedding"][0] for item in document["data"]] == list(range(2048))
    assert document["usage"]["prompt_tokens"] == 5 * 2048


async def test_what_waits_behind_an_error_is_never_sent(engine: FakeEngineClient) -> None:
    window = Window(engine)
    app = app_of(engine, max_queue_size=4)
    call = Call(app, PATH, {"input": [str(i) for i in range(20)]})
    await engine.submitted.wait()
    window.answer()
    engine.deliver(window.open[1].request_ids[0], end=failed(500, "broken"))
    status, _, body = await call.answer()
    assert status == 500 and json.loads(body)["error"]["message"] == "input[2]: broken"
    assert len(engine.requests) == 6 and not engine.open_requests and app.state.server.admission.used == 0


async def test_what_waits_is_aborted_with_the_rest(engine: FakeEngineClient) -> None:
    Window(engine)
    app = app_of(engine, max_queue_size=4)
    call = Call(app, PATH, {"input": [str(i) for i in range(20)]})
    await engine.submitted.wait()
    call.disconnect()
    await call.done()
    assert engine.aborted == [1, 2, 3, 4] and len(engine.requests) == 4
    assert not engine.open_requests and app.state.server.admission.used == 0


async def test_it_counts_in_the_metrics(embedder: httpx.AsyncClient) -> None:
    await embedder.post(PATH, json={"input": ["a", "b"]})
    await embedder.post(PATH, json={"input": ""})
    text = (await embedder.get("/metrics")).text
    assert 'weft_requests_total{outcome="completed"} 2.0' in text
    assert 'weft_rejections_total{reason="invalid"} 1.0' in text
