"""The examples of docs/gateway.md are accepted as they stand, and no endpoint of the gateway is without a word."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Route

from tests.gateway.scripted import ScriptedWorker

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "gateway.md").read_text()


async def test_examples(gateway_of: Callable[..., Any]) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    for block in blocks:
        async with gateway_of([ScriptedWorker()]) as it:
            words = shlex.split(block)
            url = next(word for word in words if word.startswith("http://127.0.0.1:8100/"))
            body = words[words.index("-d") + 1] if "-d" in words else None
            method = words[words.index("-X") + 1] if "-X" in words else "GET" if body is None else "POST"
            answer = await it.http.request(method, urlsplit(url).path, content=body)
            assert answer.status_code in ((404,) if "/api/queue/" in url else (200, 201)), (block, answer.text)


async def test_every_endpoint_is_described(gateway_of: Callable[..., Any]) -> None:
    both = TEXT + (DOCS / "http-api.md").read_text()
    async with gateway_of([]) as it:
        app = it.gateway.app.app
        for route in app.routes:
            if isinstance(route, Route) and not route.path.startswith("/console/"):
                assert re.split(r"/?\{", route.path)[0] in both, route.path


def test_every_metric_is_described() -> None:
    source = (DOCS.parent / "src" / "weft" / "gateway" / "admin.py").read_text()
    names = set(re.findall(r'MetricFamily\(\s*"(weft_\w+)"', source))
    assert len(names) == 6
    for name in names:
        assert name in TEXT, name
