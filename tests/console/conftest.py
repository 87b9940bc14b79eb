"""A headless Chromium, and pages in it that are watched: an error in their console or a request elsewhere fails."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.console.scripted import Scripted

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PROBE = r"404 .*/workers$"
"""The page asks a worker whether it is a gateway; the browser logs that it is not."""

Open = Callable[..., AbstractAsyncContextManager[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser() -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@dataclass
class Watch:
    """What a page did. `allowed`: patterns of console errors, as `TEXT URL`, that do not fail the test."""

    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=lambda: [PROBE])

    def check(self, origin: str) -> None:
        wrong = [error for error in self.errors if not any(re.search(pattern, error) for pattern in self.allowed)]
        assert not wrong, wrong
        elsewhere = [url for url in self.urls if urlsplit(url).netloc != origin and not url.startswith("data:")]
        assert self.urls and not elsewhere, elsewhere


@pytest.fixture
def open_page(browser: Any) -> Open:
    """`async with open_page(url, "/console", **of the context) as page`; `page.watch` is its `Watch`."""

    @asynccontextmanager
    async def opened(
        url: str, path: str = "/console", *, script: str | None = None, **about: Any
    ) -> AsyncIterator[Any]:
        context = await browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | about))
        page = await context.new_page()
        page.set_default_timeout(20_000)
        watch = page.watch = Watch()
        page.on(
            "console", lambda m: watch.errors.append(f"{m.text} {m.location['url']}") if m.type == "error" else None
        )
        page.on("pageerror", lambda error: watch.errors.append(f"uncaught: {error}"))
        context.on("request", lambda request: watch.urls.append(request.url))
        page.on("websocket", lambda socket: watch.urls.append(socket.url))
        if script is not None:
            await page.add_init_script(script)
        await page.goto(url + path)
        try:
            yield page
        finally:
            await context.close()
        watch.check(urlsplit(url).netloc)

    return opened


@pytest_asyncio.fixture(loop_scope="session")
async def worker() -> AsyncIterator[Scripted]:
    async with Scripted().serve() as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[Scripted]:
    async with Scripted(gateway=True).serve() as server:
        yield server
