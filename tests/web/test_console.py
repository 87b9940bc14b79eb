"""The console's files as a worker serves them: open, typed, locked down, and complete."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from tests.server.fakes import FACTS, FakeEngineClient, settings
from weft.server import create_app
from weft.web import console

ASSETS = files("weft").joinpath("assets", "console")


def client(**http: object) -> httpx.AsyncClient:
    app = create_app(FakeEngineClient(), FACTS, settings(**http))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft")


@pytest.mark.parametrize("path", sorted(console.PATHS))
async def test_every_file_is_served_without_a_key(path: str) -> None:
    async with client(api_keys=("secret",)) as http:
        response = await http.get(path)
    name = path.removeprefix("/console").strip("/") or "index.html"
    assert response.status_code == 200
    assert response.content == ASSETS.joinpath(name).read_bytes()
    assert response.headers["content-type"] == console.FILES[name]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy and "http" not in policy


async def test_everything_else_needs_the_key() -> None:
    async with client(api_keys=("secret",)) as http:
        for path in ("/stats", "/v1/cache", "/console/../stats", "/console/nothing.js"):
            assert (await http.get(path)).status_code == 401, path
        known = {"Authorization": "Bearer secret"}
        assert (await http.get("/v1/cache", headers=known)).status_code == 200
        assert (await http.get("/console/nothing.js", headers=known)).status_code == 404
        assert (await http.post("/console", headers=known)).status_code == 405


async def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async with client() as http:
        tag = (await http.get("/console")).headers["etag"]
        for known in (tag, f'"other", W/{tag}'):
            again = await http.get("/console", headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await http.get("/console", headers={"If-None-Match": '"other"'})).status_code == 200
        assert (await http.get("/console/app.js")).headers["etag"] != tag


def test_the_list_of_files_is_complete() -> None:
    assert {entry.name for entry in ASSETS.iterdir()} == set(console.FILES)


@pytest.mark.parametrize("name", sorted(console.FILES))
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = ASSETS.joinpath(name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|\burl\(|@import|innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert name.endswith(".js") or not re.findall(r"\son[a-z]+=|style=|<script>", text)
    for path in re.findall(r"/console/[\w.]+", text):
        assert path in console.PATHS, path
