"""The examples of docs/http-api.md are accepted as they stand."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.fakes import FACTS, FakeEngineClient, FakeSpeaker, embeds, settings
from weft.server import create_app
from weft.server.app import _DELETE, _GET, _POST

DOCUMENT = Path(__file__).parents[2] / "docs" / "http-api.md"


@dataclass
class Example:
    """One curl command."""

    method: str
    path: str
    body: str | None
    headers: dict[str, str]


def examples() -> list[Example]:
    result = []
    for block in re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE):
        command, *arguments = shlex.split(block)
        assert command == "curl", block
        example = Example("GET", "", None, {})
        while arguments:
            argument = arguments.pop(0)
            if argument == "-d":
                example.method, example.body = "POST", arguments.pop(0)
            elif argument == "-X":
                example.method = arguments.pop(0)
            elif argument == "-H":
                name, _, value = arguments.pop(0).partition(": ")
                assert name == "Content-Type" or name.startswith("X-")
                example.headers[name] = value
            elif argument == "-o":
                arguments.pop(0)
            elif argument != "-N":
                assert argument.startswith("http://127.0.0.1:8000/")
                example.path = urlsplit(argument).path
        result.append(example)
    return result


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example.method} {example.path}")
async def test_example(
    http: httpx.AsyncClient, embedder: httpx.AsyncClient, engine: FakeEngineClient, example: Example
) -> None:
    engine.engine_answers["request"] = {"id": 17}
    assert (example.body is None) == ("Content-Type" not in example.headers)
    if example.path == "/v1/embeddings":
        engine.behaviour = embeds([0.5] * 4)
        http = embedder
    if example.path == "/v1/audio/speech":
        app = create_app(engine, FACTS, settings(), FakeSpeaker())  # type: ignore[arg-type]
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft")
    response = await http.request(example.method, example.path, content=example.body, headers=example.headers)
    assert response.status_code == 200, response.text


def test_every_endpoint_has_an_example() -> None:
    known = {*_GET, *_POST, *_DELETE} - {"/v1/models/{name:path}"}
    shown = {example.path for example in examples()}
    for path in known:
        start = path.partition("{")[0]
        assert any(one.startswith(start) and (one == path or start != path) for one in shown), path
    for path in shown:
        assert any(path == one or ("{" in one and path.startswith(one.partition("{")[0])) for one in known), path
