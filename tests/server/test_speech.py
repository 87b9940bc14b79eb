"""POST /v1/audio/speech, with a speaker that says one clause a word."""

from __future__ import annotations

import asyncio
import io
import struct
import threading
import wave
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from tests.server.driver import Call
from tests.server.fakes import FACTS, FakeEngineClient, FakeSpeaker, settings
from weft.config.settings import Settings, SpeechSettings
from weft.core.errors import EngineError, InvalidRequestError, NotFoundError, QueueFullError, UnavailableError
from weft.server import create_app
from weft.server.speech import AHEAD, AT_ONCE, BrokenSpeech, Desk, Utterance

PATH = "/v1/audio/speech"


@pytest.fixture
def speaker() -> FakeSpeaker:
    return FakeSpeaker()


@pytest.fixture
def app(engine: FakeEngineClient, speaker: FakeSpeaker) -> FastAPI:
    return create_app(engine, FACTS, settings(), speaker)  # type: ignore[arg-type]


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as client:
        yield client


def said(words: int) -> bytes:
    values = [np.full(240, round(float(np.float32((n + 1) / 10)) * 32767), "<i2") for n in range(words)]
    return b"".join(value.tobytes() for value in values)


async def until(condition: Callable[[], bool]) -> None:
    """Gives threads and the event loop their turns until it holds; the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0)


# ---- answers -----------------------------------------------------------------------------------------------------


async def test_wav(http: httpx.AsyncClient, speaker: FakeSpeaker, app: FastAPI) -> None:
    response = await http.post(PATH, json={"input": "one two three"})
    assert response.status_code == 200 and response.headers["content-type"] == "audio/wav"
    assert response.headers["x-request-id"] == "1" and "content-length" not in response.headers
    head, data = response.content[:44], response.content[44:]
    assert data == said(3)
    assert head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and head[36:40] == b"data"
    assert struct.unpack("<IHHIIHH", head[16:36]) == (16, 1, 1, 24_000, 48_000, 2, 16)
    assert struct.unpack("<I", head[40:]) == (0xFFFFFFFF,)
    with wave.open(io.BytesIO(response.content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
    assert (speaker.begun, speaker.said) == ([("auto", 1.0)], ["one", "two", "three"]) and app.state.speech.used == 0


async def test_pcm(http: httpx.AsyncClient, speaker: FakeSpeaker) -> None:
    body = {"input": "one two", "response_format": "pcm", "voice": "en-us", "speed": 2, "model": "tts-1"}
    response = await http.post(PATH, json=body | {"stream_format": "audio", "instructions": None})
    assert response.status_code == 200 and response.headers["content-type"] == "audio/pcm"
    assert response.content == said(2)
    assert speaker.begun == [("en-us", 2.0)]


@pytest.mark.parametrize("model", ["weft-demo", "tts-1", "fake-speech", None])
async def test_models(http: httpx.AsyncClient, model: str | None) -> None:
    assert (await http.post(PATH, json={"input": "a", "model": model})).status_code == 200


@pytest.mark.parametrize("voice", ["alloy", "echo", "fable", "onyx", "nova", "shimmer", "auto", None])
async def test_openais_voices_are_the_default_one(
    http: httpx.AsyncClient, speaker: FakeSpeaker, voice: str | None
) -> None:
    assert (await http.post(PATH, json={"input": "a", "voice": voice})).status_code == 200
    assert speaker.begun == [("auto", 1.0)]


@pytest.mark.parametrize(("form", "length"), [("wav", 44), ("pcm", 0)])
async def test_a_text_without_sound(http: httpx.AsyncClient, form: str, length: int) -> None:
    response = await http.post(PATH, json={"input": " ", "response_format": form})
    assert response.status_code == 200 and len(response.content) == length


async def test_what_is_too_loud_is_cut_off(http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json={"input": "w " * 12, "response_format": "pcm"})
    assert np.frombuffer(response.content, "<i2").max() == 32767


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "input", "this field is needed"),
        ({"input": ""}, 400, "input", "at least 1 character"),
        ({"input": "x" * 4097}, 400, "input", "at most 4096 characters"),
        ({"input": ["a"]}, 400, "input", "string"),
        ({"input": "a", "voice": "verse"}, 400, "voice", "'verse' is not allowed (allowed: auto, en-us)"),
        ({"input": "a", "voice": {"id": "x"}}, 400, "voice", "string"),
        ({"input": "a", "response_format": "mp3"}, 400, "response_format", "'mp3' is not allowed (allowed: wav, pcm)"),
        ({"input": "a", "response_format": {"type": "text"}}, 400, "response_format", "allowed: wav, pcm"),
        ({"input": "a", "speed": 0.2}, 400, "speed", "greater than or equal to 0.25"),
        ({"input": "a", "speed": 4.5}, 400, "speed", "less than or equal to 4"),
        ({"input": "a", "speed": 0.3}, 400, "speed", "allowed: 0.5 to 4"),
        ({"input": "a", "speed": "1"}, 400, "speed", "'1'"),
        ({"input": "a", "stream_format": "sse"}, 400, "stream_format", "'audio'"),
        ({"input": "a", "instructions": "softly"}, 400, "instructions", "not supported"),
        ({"input": "a", "language": "en"}, 400, "language", "not a parameter"),
        ({"input": "a", "model": "other"}, 404, "model", "'weft-demo', 'tts-1', 'fake-speech'"),
    ],
)
async def test_refusals(
    http: httpx.AsyncClient, speaker: FakeSpeaker, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    response = await http.post(PATH, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param) and words in error["message"], response.text
    assert not speaker.begun


@pytest.mark.parametrize("header", ["X-Session-ID", "X-Session-TTL"])
async def test_there_are_no_sessions(http: httpx.AsyncClient, header: str) -> None:
    response = await http.post(PATH, json={"input": "a"}, headers={header: "1"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, header)


async def test_a_draining_server_takes_nothing(http: httpx.AsyncClient, app: FastAPI) -> None:
    app.state.draining = True
    response = await http.post(PATH, json={"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize(("chosen", "reason"), [("none", "speech.engine is none"), ("auto", "'weft[speech]'")])
async def test_without_a_speaker(engine: FakeEngineClient, chosen: Any, reason: str) -> None:
    app = create_app(engine, FACTS, Settings(speech=SpeechSettings(engine=chosen)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
        response = await http.post(PATH, json={"input": "a"})
    assert response.status_code == 404 and reason in response.json()["error"]["message"]


# ---- on the way --------------------------------------------------------------------------------------------------


async def test_an_error_before_the_first_clause_has_its_status(
    http: httpx.AsyncClient, speaker: FakeSpeaker, app: FastAPI
) -> None:
    speaker.failures[0] = EngineError("no voice data", code="speech_failed")
    response = await http.post(PATH, json={"input": "one two"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "speech_failed")
    speaker.failures[0] = ZeroDivisionError("secret")
    response = await http.post(PATH, json={"input": "one two"})
    assert response.status_code == 500 and "secret" not in response.text
    assert app.state.speech.used == 0


@pytest.mark.parametrize("failure", [EngineError("broke"), ZeroDivisionError("broke")])
async def test_a_later_error_cuts_the_connection(app: FastAPI, speaker: FakeSpeaker, failure: Exception) -> None:
    speaker.failures[1] = failure
    call = Call(app, PATH, {"input": "one two", "response_format": "pcm"})
    assert (await call.next())["status"] == 200
    assert await call.next_data() == said(1)
    with pytest.raises(BrokenSpeech):
        await call.done()
    assert call.nothing_sent and app.state.speech.used == 0  # above all no end of the body


async def test_the_first_clause_does_not_wait_for_the_second(app: FastAPI, speaker: FakeSpeaker) -> None:
    speaker.gates[1] = threading.Event()
    call = Call(app, PATH, {"input": "one two", "response_format": "pcm"})
    await call.next()
    assert await call.next_data() == said(1)
    speaker.gates[1].set()
    assert await call.next_data() == said(2)[480:]
    await call.done()


async def test_a_slow_client_holds_up_the_synthesis(app: FastAPI, speaker: FakeSpeaker) -> None:
    sent: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
    call = Call(lambda scope, receive, send: app(scope, receive, sent.put), PATH, {"input": "a b c d e f g h"})
    await sent.get()  # the headers; the first clause takes their place, and the second one waits for it
    await until(lambda: speaker.made == 2 + AHEAD)
    for _ in range(100):
        await asyncio.sleep(0)
    assert speaker.made == 2 + AHEAD
    call.disconnect()
    await call.done()
    assert speaker.made == 2 + AHEAD and app.state.speech.used == 0


async def test_a_client_that_goes_away_stops_it_after_the_present_clause(app: FastAPI, speaker: FakeSpeaker) -> None:
    speaker.gates[1] = threading.Event()
    call = Call(app, PATH, {"input": "one two three four"})
    await call.next()
    await call.next_data()
    await until(lambda: speaker.made == 2)
    call.disconnect()
    await call.done()
    assert app.state.speech.used == 1  # its thread is still busy
    speaker.gates[1].set()
    await until(lambda: app.state.speech.used == 0)
    assert speaker.made == 2


async def test_more_than_a_few_at_once_are_refused(app: FastAPI, http: httpx.AsyncClient, speaker: FakeSpeaker) -> None:
    gate = speaker.gates[0] = threading.Event()
    calls = [Call(app, PATH, {"input": "one"}) for _ in range(AT_ONCE)]
    await until(lambda: speaker.made == AT_ONCE)
    response = await http.post(PATH, json={"input": "one"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert response.headers["retry-after"] == "1"
    assert (await http.get("/health")).status_code == 200  # the event loop is free meanwhile
    gate.set()
    assert [(await call.answer())[0] for call in calls] == [200] * AT_ONCE
    assert (await http.post(PATH, json={"input": "one"})).status_code == 200


async def test_metrics(http: httpx.AsyncClient, speaker: FakeSpeaker, app: FastAPI) -> None:
    speaker.failures[1] = EngineError("broke")
    desk = app.state.speech
    for _ in range(2):
        desk.begin(None, None, None).push("one two ")
    await until(lambda: desk.failures == 2)
    lines = (await http.get("/metrics")).text.splitlines()
    assert 'weft_speech_utterances{state="open"} 2.0' in lines
    assert "weft_speech_seconds_total 0.02" in lines and "weft_speech_failures_total 2.0" in lines


# ---- text that comes piece by piece ------------------------------------------------------------------------------


@pytest.fixture
async def desk(speaker: FakeSpeaker) -> AsyncIterator[Desk]:
    desk = Desk(speaker, "auto")
    yield desk
    await desk.close()


async def rest(utterance: Utterance) -> list[int]:
    """Numbers of the clauses that are still to come."""
    result = []
    while (samples := await utterance.next()) is not None:
        result.append(round(float(samples[0]) * 10))
    return result


async def test_audio_is_there_before_the_text_is_finished(desk: Desk, speaker: FakeSpeaker) -> None:
    utterance = desk.begin(None, None, None)
    utterance.push("on")
    utterance.push("e two")
    samples = await utterance.next()
    assert samples is not None and samples.dtype == np.float32 and len(samples) == 240
    assert speaker.said == ["one"]
    waiting = asyncio.ensure_future(utterance.next())
    await asyncio.sleep(0)
    assert not waiting.done()  # "two" may go on
    utterance.push(" three")
    assert await waiting is not None
    utterance.finish()
    assert await rest(utterance) == [3] and await utterance.next() is None
    assert speaker.said == ["one", "two", "three"] and desk.seconds == pytest.approx(0.03)
    utterance.close()
    assert desk.used == desk.failures == 0


async def test_a_text_that_waits_for_its_end(desk: Desk) -> None:
    for text, clauses in (("", 0), ("  ", 0), ("one", 1)):
        utterance = desk.begin(None, None, None)
        waiting = asyncio.ensure_future(utterance.next())
        utterance.push(text)
        await asyncio.sleep(0)
        utterance.finish()
        utterance.finish()
        assert (await waiting is not None) == bool(clauses) and await rest(utterance) == []
        utterance.close()


async def test_text_never_waits_for_audio(desk: Desk, speaker: FakeSpeaker) -> None:
    gate = speaker.gates[0] = threading.Event()
    utterance = desk.begin(None, None, None)
    for _ in range(50):
        utterance.push("word ")
    utterance.finish()
    assert len(speaker.said) <= 1
    gate.set()
    await until(lambda: speaker.made == AHEAD)
    for _ in range(100):
        await asyncio.sleep(0)
    assert speaker.made == AHEAD  # nobody takes them
    assert len(await rest(utterance)) == 50
    utterance.close()


async def test_closing_while_a_clause_is_made(desk: Desk, speaker: FakeSpeaker) -> None:
    gate = speaker.gates[0] = threading.Event()
    utterance = desk.begin(None, None, None)
    utterance.push("one two three ")
    waiting = asyncio.ensure_future(utterance.next())
    await until(lambda: speaker.made == 1)
    utterance.close()
    utterance.close()
    assert await waiting is None and desk.used == 1
    utterance.push("four five")
    utterance.finish()
    gate.set()
    await until(lambda: desk.used == 0)
    assert speaker.said == ["one"] and await utterance.next() is None and desk.used == 0


async def test_a_wait_that_is_cancelled_loses_nothing(desk: Desk, speaker: FakeSpeaker) -> None:
    gate = speaker.gates[0] = threading.Event()
    utterance = desk.begin(None, None, None)
    utterance.push("one two")
    waiting = asyncio.ensure_future(utterance.next())
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    utterance.finish()
    assert await rest(utterance) == [1, 2]
    utterance.close()


@pytest.mark.parametrize("failure", [EngineError("no data", code="speech_failed"), ZeroDivisionError("secret")])
async def test_a_failure_ends_one_utterance(desk: Desk, speaker: FakeSpeaker, failure: Exception) -> None:
    speaker.failures[1] = failure
    utterance, other = desk.begin(None, None, None), desk.begin(None, None, None)
    utterance.push("one two three ")
    other.push("one ")
    assert await utterance.next() is not None
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            await utterance.next()
        assert caught.value.code == "speech_failed" and "secret" not in caught.value.message
    utterance.push("four ")
    utterance.finish()
    with pytest.raises(EngineError):
        await utterance.next()
    assert await other.next() is not None
    for one in (utterance, other):
        one.close()
    assert desk.failures == 1 and desk.used == 0 and sorted(speaker.said) == ["one", "one", "two"]


async def test_what_was_made_before_a_failure_comes_first(desk: Desk, speaker: FakeSpeaker) -> None:
    speaker.failures[2] = EngineError("broke")
    utterance = desk.begin(None, None, None)
    utterance.push("one two three ")
    await until(lambda: desk.failures == 1)
    assert await utterance.next() is not None and await utterance.next() is not None
    with pytest.raises(EngineError):
        await utterance.next()
    utterance.close()


async def test_places_are_given_back_and_refused(desk: Desk, speaker: FakeSpeaker) -> None:
    for _ in range(3):
        utterances = [desk.begin(None, None, None) for _ in range(AT_ONCE)]
        for _ in range(3):
            with pytest.raises(QueueFullError):
                desk.begin(None, None, None)
        for utterance in utterances:
            utterance.push("one two ")
        for utterance in utterances:
            assert await utterance.next() is not None
            utterance.close()
        await until(lambda: desk.used == 0)


async def test_what_the_engine_does_not_take_takes_no_place(desk: Desk, speaker: FakeSpeaker) -> None:
    for arguments in (("x", None, None), (None, 0.1, None), (None, None, np.zeros(1, np.float32))):
        with pytest.raises(InvalidRequestError):
            desk.begin(*arguments)
    assert desk.used == 0
    speaker.clones = True
    reference = np.zeros(16_000, np.float32)
    desk.begin("alloy", 2.0, reference).close()
    assert speaker.begun == [("auto", 2.0)] and speaker.references[0] is reference and desk.used == 0
    with pytest.raises(NotFoundError, match="speech.engine is none"):
        Desk(None, "none").begin(None, None, None)


async def test_a_desk_that_closes_breaks_off_what_is_said(speaker: FakeSpeaker) -> None:
    desk = Desk(speaker, "auto")
    speaker.gates[0] = threading.Event()
    utterance = desk.begin(None, None, None)
    utterance.push("one ")
    await until(lambda: speaker.made == 1)
    await desk.close()
    assert speaker.closed
    late = desk.begin(None, None, None)
    for _ in range(2):
        late.push("one two ")  # harmless
    with pytest.raises(UnavailableError):
        await late.next()
    late.close()
    utterance.close()
    await until(lambda: desk.used == 0)
