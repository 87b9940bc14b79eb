"""Images and sound over HTTP: malformed, not taken, or decoded and on their way."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.media.builders import audio, encoded, image_url, input_audio, pixels, png, text, user, wav
from tests.server.driver import Call
from tests.server.fakes import FACTS, FakeEngineClient, settings
from tests.server.ws_driver import Socket
from weft.config.settings import MediaSettings, Settings
from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.media.hashing import media_digest
from weft.media.messages import with_parts
from weft.server import create_app
from weft.server import media as server_media
from weft.server.bodies import INLINE_BYTES
from weft.server.prefixes import digests_of
from weft.server.schemas import ChatRequest
from weft.server.values import Prompt

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
BOTH = pytest.mark.parametrize("path", [CHAT, TOKENIZE])
SYSTEM = {"role": "system", "content": "Look."}
LARGE = encoded(np.random.default_rng(1).integers(0, 256, (300, 300, 3), dtype=np.uint8))
SEES = replace(FACTS, features=frozenset({"image", "audio"}))


def seeing(engine: FakeEngineClient, features: set[str], limits: MediaSettings | None = None) -> httpx.AsyncClient:
    base = settings()
    chosen = Settings(http=base.http, scheduler=base.scheduler, media=limits or MediaSettings())
    app = create_app(engine, replace(FACTS, features=frozenset(features)), chosen)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft")


@pytest.fixture
async def sees(engine: FakeEngineClient) -> AsyncIterator[httpx.AsyncClient]:
    async with seeing(engine, {"image", "audio"}) as client:
        yield client


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    result: dict[str, Any] = response.json()["error"]
    assert result["type"] == "invalid_request_error"
    return result


@BOTH
@pytest.mark.parametrize(
    ("part", "what"),
    [
        (image_url(), "images (the fake engine has no 'image' feature)"),
        (image_url(LARGE), "images (the fake engine has no 'image' feature)"),
        ({"type": "image", "data": image_url()["image_url"]["url"][22:]}, "images"),
        (audio(), "sound (the fake engine has no 'audio' feature)"),
        (input_audio(wav(b"\0\0")), "sound (the fake engine has no 'audio' feature)"),
    ],
)
async def test_an_engine_without_the_modality_refuses(
    http: httpx.AsyncClient, engine: FakeEngineClient, path: str, part: dict[str, Any], what: str
) -> None:
    body = {"messages": [SYSTEM, user(part, text("What is it?"))]}
    found = error(await http.post(path, json=body))
    assert found["message"].startswith(f"messages[1].content[0]: this model does not take {what}")
    assert (found["param"], found["code"]) == ("messages[1].content[0]", "unsupported_content")
    assert not engine.requests and not engine.queries


@BOTH
@pytest.mark.parametrize(
    ("message", "param"),
    [
        (user(text("a"), image_url() | {"x": 1}), "messages[1].content[1].x"),
        (
            user({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
            "messages[1].content[0].image_url.url",
        ),
        (user({"type": "audio", "data": "?"}), "messages[1].content[0].data"),
        (user({"type": "video", "data": "?"}), "messages[1].content[0].type"),
        (user({"type": ["image"]}), "messages[1].content[0].type"),
        ({"role": "assistant", "content": [image_url()]}, "messages[1].content[0].type"),
        ({"role": "system", "content": [audio()]}, "messages[1].content[0].type"),
        ({"role": "tool", "tool_call_id": "1", "content": [image_url()]}, "messages[1].content[0].type"),
    ],
)
async def test_malformed_parts_have_their_own_errors_first(
    http: httpx.AsyncClient, path: str, message: dict[str, Any], param: str
) -> None:
    found = error(await http.post(path, json={"messages": [user(image_url()), message]}))
    assert (found["param"], found["code"]) == (param, None)


async def test_an_engine_takes_what_it_has_features_for(engine: FakeEngineClient) -> None:
    async with seeing(engine, {"audio"}) as client:
        assert (await client.post(CHAT, json={"messages": [user(audio())]})).status_code == 200
        found = error(await client.post(CHAT, json={"messages": [user(audio(), image_url())]}))
        assert found["param"] == "messages[0].content[1]"


@pytest.mark.parametrize("data", [png(), LARGE])
async def test_decoded_media_travel_beside_placeholders(
    sees: httpx.AsyncClient, engine: FakeEngineClient, data: bytes
) -> None:
    body = {"messages": [SYSTEM, user(text("a"), image_url(data), audio([0.5]), text("b"))]}
    assert (len(json.dumps(body)) > INLINE_BYTES) == (data is LARGE)
    assert (await sees.post(CHAT, json=body)).status_code == 200
    (request,) = engine.requests
    assert request.messages == [SYSTEM, user(text("a"), {"type": "image"}, {"type": "audio"}, text("b"))]
    image, sound = request.media
    samples = np.frombuffer(image.data, np.uint8).reshape(image.shape)
    assert (image.kind, image.digest) == ("image", media_digest("image", samples))
    assert data is LARGE or (samples == pixels()).all()
    assert (sound.kind, sound.shape, sound.data) == ("audio", [1], np.array([0.5], "<f4").tobytes())


async def test_tokenizing_needs_only_shapes(sees: httpx.AsyncClient, engine: FakeEngineClient) -> None:
    assert (await sees.post(TOKENIZE, json={"messages": [user(image_url())]})).status_code == 200
    (query,) = engine.queries
    assert query.messages == [user({"type": "image"})]
    assert [(item.kind, item.shape, item.data) for item in query.media] == [("image", [5, 7, 3], b"")]


async def test_limits_come_from_the_settings(engine: FakeEngineClient) -> None:
    async with seeing(engine, {"image", "audio"}, MediaSettings(max_image_pixels=34, max_parts=1)) as client:
        found = error(await client.post(CHAT, json={"messages": [user(image_url())]}))
        assert found["param"] == "messages[0].content[0]" and "media.max_image_pixels" in found["message"]
        found = error(await client.post(CHAT, json={"messages": [user(audio(), audio())]}))
        assert "media.max_parts" in found["message"]
    assert not engine.requests


@BOTH
async def test_what_cannot_be_decoded_is_the_clients_error(sees: httpx.AsyncClient, path: str) -> None:
    found = error(await sees.post(path, json={"messages": [user(image_url(png()[:60]))]}))
    assert found["param"] == "messages[0].content[0]" and "broken" in found["message"]


async def test_a_refused_request_counts_and_leaves_no_place_taken(engine: FakeEngineClient) -> None:
    app = create_app(engine, FACTS, settings())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as client:
        error(await client.post(CHAT, json={"messages": [user(image_url())]}))
        metrics = (await client.get("/metrics")).text.splitlines()
        assert 'weft_requests_total{outcome="rejected"} 1.0' in metrics, metrics
    assert not app.state.server.jobs


async def test_decoding_leaves_the_event_loop_free(engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one image is being decoded another request is answered."""
    begun, go_on = threading.Event(), threading.Event()
    decode = server_media._decode

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return decode(*args)

    monkeypatch.setattr(server_media, "_decode", slow)
    app = create_app(engine, SEES, settings())  # type: ignore[arg-type]
    call = Call(app, CHAT, {"messages": [user(image_url())]})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as client:
        while not begun.is_set():
            assert (await client.post(CHAT, json={"messages": [user(text("hi"))]})).status_code == 200
        assert call.nothing_sent
        go_on.set()
        await call.task
    assert not call.nothing_sent


async def test_parts_that_nobody_looked_at_do_not_get_past_start(engine: FakeEngineClient) -> None:
    """Whatever endpoint a chat comes by."""
    server = create_app(engine, FACTS, settings()).state.server  # type: ignore[arg-type]
    prompt = Prompt(messages=with_parts([user(text("a"), image_url())]))
    with pytest.raises(InvalidRequestError) as caught:
        server.start(None, ChatRequest(messages=[SYSTEM]), [prompt], SamplingParams())
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1]", "unsupported_content")
    assert not engine.requests and not server.jobs


# ---- sessions ----------------------------------------------------------------------------------------------------


async def test_a_session_refuses_what_the_engine_does_not_take(engine: FakeEngineClient) -> None:
    socket = await Socket(create_app(engine, FACTS, settings())).open()  # type: ignore[arg-type]
    for part, code, place in (
        (image_url(), "unsupported_content", "messages[0].content[1]"),
        ({"type": "audio", "data": "?"}, "invalid_request", "messages[0].content[1].data"),
    ):
        socket.send("prefill", messages=[user(text("a"), part)])
        answer = await socket.next()
        assert answer["type"] == "error", answer
        assert (answer["code"], answer["param"]) == (code, place) and answer["message"].startswith(place), answer
    assert not engine.requests


async def test_a_session_remembers_what_it_was_shown(engine: FakeEngineClient) -> None:
    socket = await Socket(create_app(engine, SEES, settings())).open()  # type: ignore[arg-type]
    for parts in ([text("a"), image_url(png(1))], [audio([0.5])]):
        socket.send("prefill", messages=[user(*parts)])
        assert (await socket.next())["type"] == "prefill_done"
        socket.send("generate")
        await socket.until("done")
    shown = [([item.kind for item in request.media], request.stream) for request in engine.requests]
    assert shown == [(["image"], False), (["image"], True), (["image", "audio"], False), (["image", "audio"], True)]
    assert engine.requests[-1].messages == [
        user(text("a"), {"type": "image"}),
        {"role": "assistant", "content": "Hello world"},
        user({"type": "audio"}),
    ]


def test_prompts_with_media_are_not_told_to_gateways() -> None:
    """By their placeholders two different images would be the same prompt."""
    assert digests_of(Prompt(messages=[user(text("a"))]), "")
    assert digests_of(Prompt(messages=[SYSTEM, user(text("a"), {"type": "image"})]), "") == []
