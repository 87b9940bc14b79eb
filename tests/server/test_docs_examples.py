"""The examples of docs/http-api.md are accepted as they stand."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from weft.server.app import _GET, _POST

DOCUMENT = Path(__file__).parents[2] / "docs" / "http-api.md"


@dataclass
class Example:
    """One curl command."""

    method: str
    path: str
    body: str | None


def examples() -> list[Example]:
    result = []
    for block in re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE):
        command, *arguments = shlex.split(block)
        assert command == "curl", block
        example = Example("GET", "", None)
        while arguments:
            argument = arguments.pop(0)
            if argument == "-d":
                example.method, example.body = "POST", arguments.pop(0)
            elif argument == "-X":
                example.method = arguments.pop(0)
            elif argument == "-H":
                assert arguments.pop(0) == "Content-Type: application/json"
            elif argument != "-N":
                assert argument.startswith("http://127.0.0.1:8000/")
                example.path = urlsplit(argument).path
        result.append(example)
    return result


@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example.method} {example.path}")
async def test_example(http: httpx.AsyncClient, example: Example) -> None:
    headers = {} if example.body is None else {"Content-Type": "application/json"}
    response = await http.request(example.method, example.path, content=example.body, headers=headers)
    assert response.status_code == 200, response.text


def test_every_endpoint_has_an_example() -> None:
    known = {*_GET, *_POST} - {"/v1/models/{name:path}", "/v1/embeddings", "/v1/audio/speech"}
    assert {example.path for example in examples()} == known
