"""Bad input against a real worker: each ends with an error that names the field, and the server goes on."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch.worker import Worker

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("completions", {"prompt": ""}, 400, "prompt", ("empty",)),
        ("completions", {"prompt": []}, 400, "prompt", ()),
        ("chat/completions", {"messages": []}, 400, "messages", ()),
        ("completions", {"prompt": [5] * 2500}, 400, "prompt", ("2500", "2047")),
        ("completions", {"prompt": "lorem ipsum " * 3000}, 400, "prompt", ("2047",)),
        ("completions", {"prompt": [5] * 2000, "max_tokens": 100}, 400, "max_tokens", ("2000", "100", "2048")),
        ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", ("-1",)),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", ("hot",)),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", ("-1",)),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p", ()),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", ("wizard",)),
        ("chat/completions", {"messages": HELLO, "stop": [f"s{i}" for i in range(5000)]}, 400, "stop", ("5000",)),
        ("completions", {"prompt": [4096]}, 400, "prompt", ("4096", "4095")),
        ("completions", {"prompt": [-1]}, 400, "prompt", ("-1",)),
        ("completions", {"prompt": [2**40]}, 400, "prompt", ()),
        ("completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias", ("99999",)),
        ("completions", {"prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids", ("99999",)),
        ("completions", {"prompt": "a", "seed": 2**70}, 400, "seed", ()),
        ("completions", {"prompt": "a", "n": 0}, 400, "n", ()),
        ("completions", {"prompt": "a", "timeout_s": -1}, 400, "timeout_s", ()),
        ("completions", {"prompt": "a", "priority": 3}, 400, "priority", ("scheduler.priority",)),
        ("completions", {"prompt": "a", "presence_penalty": 1}, 400, "penalties", ("fake",)),
        ("chat/completions", {"messages": HELLO, "functions": [{}]}, 400, "functions", ()),
        ("chat/completions", {"messages": HELLO, "model": "gpt-9"}, 404, "model", ("gpt-9", "weft-demo")),
    ],
)
def test_refused_with_the_field_named(
    worker: Worker, path: str, body: dict[str, Any], status: int, param: str, words: tuple[str, ...]
) -> None:
    for stream in (False, True):
        response = worker.http.post(f"/v1/{path}", json=body | {"stream": stream})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert param.split("[")[0] in error["message"] or param in error["message"]
        for word in words:
            assert word in error["message"]
    assert worker.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert worker.stats()["kv"]["active"] == 0


def test_context_error_has_openai_code(worker: Worker) -> None:
    error = worker.http.post("/v1/completions", json={"prompt": [5] * 3000}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_invalid_json_and_unknown_paths(worker: Worker) -> None:
    for content in (b"{", b"", b"[1]", b"\xff\xfe", b'"text"', b"nul"):
        response = worker.http.post("/v1/chat/completions", content=content)
        assert response.status_code == 400, (content, response.text)
        assert "message" in response.json()["error"]
    assert worker.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert worker.http.get("/v1/chat/completions").status_code == 405


def test_body_of_40_mb_is_refused_from_its_length(worker: Worker) -> None:
    port = int(re.findall(r":(\d+)$", worker.url)[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 41943040\r\n\r\n"
        )
        head = connection.recv(4096)
    assert head.startswith(b"HTTP/1.1 413 ")
    response = worker.http.post("/v1/completions", content=b" " * 41_943_040)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_garbage_on_the_wire_harms_nobody(worker: Worker) -> None:
    port = int(re.findall(r":(\d+)$", worker.url)[0])
    for garbage in (b"\x00\xff" * 1000, b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(garbage)
    assert worker.http.get("/health").status_code == 200
