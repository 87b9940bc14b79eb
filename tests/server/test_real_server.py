"""The app under uvicorn: the `openai` package, and sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import uvicorn

from tests.server.fakes import FACTS, FakeEngineClient, ended, failed, says, settings, silent
from weft.ipc.messages import TextRequest
from weft.server import create_app

HI: Any = [{"role": "user", "content": "hi"}]
PATIENCE_S = 10.0


@dataclass
class Running:
    """A server in a thread. `engine` may be read from the test; what changes it goes through `call`."""

    port: int
    engine: FakeEngineClient
    loop: asyncio.AbstractEventLoop
    app: Any

    def call(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `work` in the server's loop; waits for its result if it is a coroutine function."""

        async def run() -> Any:
            result = work(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)


@contextlib.contextmanager
def serving(http: str) -> Iterator[Running]:
    """uvicorn with this HTTP implementation on a free port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    started: list[Running] = []
    up = threading.Event()

    async def main() -> None:
        engine = FakeEngineClient()
        app = create_app(engine, FACTS, settings())  # type: ignore[arg-type]
        config = uvicorn.Config(app, http=http, log_level="error", lifespan="off", timeout_graceful_shutdown=1)  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        running = Running(listener.getsockname()[1], engine, asyncio.get_running_loop(), app)
        started.append(running)
        stopping.append(lambda: setattr(server, "should_exit", True))
        serving_task = asyncio.ensure_future(server.serve(sockets=[listener]))
        up.set()
        await serving_task

    stopping: list[Callable[[], None]] = []
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    listener.listen()  # so that nobody who connects early is refused
    thread.start()
    assert up.wait(PATIENCE_S)
    try:
        yield started[0]
    finally:
        stopping[0]()
        thread.join(PATIENCE_S)
        listener.close()


@pytest.fixture(scope="module", params=["httptools", "h11"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(request.param) as result:
        yield result


@pytest.fixture(autouse=True)
def fresh(running: Running) -> None:
    """Every test starts with the friendly behaviour and empty records."""
    engine = running.engine
    engine.behaviour = says("Hello", " world")
    engine.requests.clear()
    engine.aborted.clear()

    def new_events() -> None:
        engine.submitted, engine.abort_seen = asyncio.Event(), asyncio.Event()

    running.call(new_events)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: weft", "Content-Type: application/json", *headers]
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


# ---- the openai package -------------------------------------------------------------------------------------------


def test_openai_chat(running: Running) -> None:
    answer = running.openai().chat.completions.create(model="weft-demo", messages=HI, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_openai_chat_streaming(running: Running) -> None:
    stream = running.openai().chat.completions.create(
        model="weft-demo",
        messages=HI,
        n=2,
        stream=True,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "weft": True},
    )
    texts = {0: "", 1: ""}
    scores, usage = [], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                scores += [entry.logprob for entry in choice.logprobs.content]
        usage = chunk.usage or usage
    assert texts == {0: "Hello world", 1: "Hello world"}
    assert scores == [-0.5] * 4
    assert usage is not None
    assert usage.total_tokens == 9


def test_openai_completions(running: Running) -> None:
    answer = running.openai().completions.create(model="weft-demo", prompt=["a", "b"], echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["aHello world", "bHello world"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset is not None
    text = "".join(
        part.choices[0].text for part in running.openai().completions.create(model="weft-demo", prompt="a", stream=True)
    )
    assert text == "Hello world"
    assert [model.id for model in running.openai().models.list()] == ["weft-demo"]
    assert running.openai().models.retrieve("weft-demo").id == "weft-demo"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (408, openai.APIStatusError),
        (429, openai.RateLimitError),
        (499, openai.APIStatusError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_openai_error_classes(running: Running, status: int, kind: type[openai.APIStatusError], stream: bool) -> None:
    def fails(client: FakeEngineClient, request: TextRequest) -> None:
        client.deliver(request.request_ids[0], end=failed(status, "scripted", code=code))

    code = "queue_full" if status == 429 else "why"
    running.engine.behaviour = fails
    with pytest.raises(kind) as caught:
        running.openai().chat.completions.create(model="weft-demo", messages=HI, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == code
    assert caught.value.response.headers["x-request-id"]
    assert ("retry-after" in caught.value.response.headers) == (status == 429)


def test_openai_unknown_model_and_bad_parameter(running: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        running.openai().chat.completions.create(model="gpt-9", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        running.openai().chat.completions.create(model="weft-demo", messages=HI, temperature="hot")  # type: ignore[call-overload]
    assert bad.value.param == "temperature"


def test_openai_error_in_a_stream(running: Running) -> None:
    def breaks(client: FakeEngineClient, request: TextRequest) -> None:
        client.deliver(request.request_ids[0], "Hel")

    running.engine.behaviour = breaks
    stream = running.openai().chat.completions.create(model="weft-demo", messages=HI, stream=True)
    first = next(iter(stream))
    assert first.choices[0].delta.content == "Hel"
    request_id = running.engine.requests[0].request_ids[0]
    running.call(running.engine.deliver, request_id, end=failed(500, "the engine broke", code="engine_error"))
    with pytest.raises(openai.APIError, match="the engine broke") as caught:
        list(stream)
    assert caught.value.code == "engine_error"


# ---- sockets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_ends_its_work(running: Running, stream: bool) -> None:
    running.engine.behaviour = silent
    with running.connect() as connection:
        connection.sendall(post("/v1/completions", json.dumps({"prompt": "hi", "stream": stream}).encode()))
        running.call(running.engine.submitted.wait)
        (request_id,) = running.engine.requests[0].request_ids
        if stream:
            running.call(running.engine.deliver, request_id, "He")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    running.call(running.engine.abort_seen.wait)
    assert running.engine.aborted == [request_id]
    running.call(running.app.state.gate.wait_idle)
    assert running.engine.open_requests == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_of_40_mb_is_413(running: Running, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * 40_000_000 + b'"}'
    if chunked:
        body, headers = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), ["Transfer-Encoding: chunked"]
    else:
        headers = []
    with running.connect() as connection:
        connection.sendall(post("/v1/completions", body, *headers))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer
    assert running.engine.requests == []
    assert running.openai().completions.create(model="weft-demo", prompt="hi").choices[0].text == "Hello world"


def test_a_patient_client_does_not_send_a_refused_body(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(post("/v1/completions", b"", "Content-Length: 40000000", "Expect: 100-continue"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_garbage_bytes(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x00garbage\r\n\r\n" * 100)
        assert read_all(connection).startswith(b"HTTP/1.1 400")
    with running.connect() as connection:
        connection.sendall(post("/v1/completions", b"\x00\xff\xfe garbage"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    assert running.openai().completions.create(model="weft-demo", prompt="hi").choices[0].text == "Hello world"


def test_one_connection_serves_many_requests(running: Running) -> None:
    running.engine.behaviour = lambda client, request: client.deliver(request.request_ids[0], "ok", end=ended())
    with running.connect() as connection, connection.makefile("rb") as answers:
        for body in (b'{"prompt": "hi"}', b'{"prompt": ""}', b"{", b'{"prompt": "hi"}'):
            connection.sendall(post("/v1/completions", body))
            status = int(answers.readline().split()[1])
            length = 0
            while line := answers.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert json.loads(answers.read(length))
            assert status == (200 if body == b'{"prompt": "hi"}' else 400)
