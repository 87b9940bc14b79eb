"""The console against real workers, with all their processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio

from tests.console.conftest import Open
from tests.launch.gateway import GatewayUnderTest
from tests.launch.worker import Worker

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.async_api import expect  # noqa: E402
from websockets.asyncio.client import connect  # noqa: E402
from websockets.exceptions import InvalidStatus  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = {"prompt": "The loom holds many threads", "max_tokens": 8}


@pytest.fixture(scope="module")
def demo() -> Iterator[Worker]:
    """The bundled model."""
    if find_spec("torch") is None:
        pytest.skip("needs the torch engine")
    with Worker(backend="torch") as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Worker]:
    """Twenty tokens a second, so that there is time to stop."""
    with Worker("--set", "backend.fake.tokens_per_s=20") as running:
        yield running


@pytest.fixture(scope="module")
def one_place() -> Iterator[GatewayUnderTest]:
    """A gateway before one slow worker that has room for one conversation."""
    settings = ("--set", "backend.fake.tokens_per_s=20", "--set", "http.max_sessions=1")
    with GatewayUnderTest("--spawn", "1", "--backend", "fake", *settings) as running:
        yield running


async def sessions_of(worker: Worker) -> str:
    """Its address; skips where the worker has no sessions over WebSockets."""
    try:
        async with connect(worker.url.replace("http", "ws", 1) + "/ws/streaming/probe"):
            return worker.url
    except InvalidStatus as refused:
        if refused.response.status_code in (403, 404):
            pytest.skip("this worker has no /ws/streaming")
        raise


@pytest_asyncio.fixture(loop_scope="session")
async def demo_url(demo: Worker) -> AsyncIterator[str]:
    yield await sessions_of(demo)


@pytest_asyncio.fixture(loop_scope="session")
async def slow_url(slow: Worker) -> AsyncIterator[str]:
    yield await sessions_of(slow)


async def say(page: Any, text: str, number: int) -> Any:
    await expect(page.locator("#kind")).not_to_be_empty()  # its script runs
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Enter")
    return page.locator(".turn").nth(number)


async def test_two_turns(open_page: Open, demo_url: str) -> None:
    async with open_page(demo_url) as page:
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_label("Max tokens").fill("40")
        for number, text in enumerate(("Hello! My name is Anna.", "What is the capital of France?")):
            node = await say(page, text, number)
            await expect(node).to_have_attribute("data-state", "done")
            assert await node.locator(".answer .text").inner_text()
        cached = await node.locator("[data-fact=cached] b").inner_text()
        assert int(cached.replace(",", "")) > 0


async def test_stop(open_page: Open, slow_url: str) -> None:
    async with open_page(slow_url) as page:
        await page.get_by_label("Max tokens").fill("2000")
        node = await say(page, "Go on for ever.", 0)
        await expect(node.locator(".answer .text")).not_to_be_empty()
        await page.get_by_role("button", name="Stop").click()
        await expect(node).to_have_attribute("data-state", "stopped")
        await page.get_by_label("Max tokens").fill("3")
        node = await say(page, "And again?", 1)
        await expect(node).to_have_attribute("data-state", "done")


async def test_the_live_view_of_a_worker(open_page: Open, slow: Worker) -> None:
    done = slow.http.post("/v1/completions", json=PROMPT).raise_for_status().json()
    tokens = done["usage"]["prompt_tokens"] + done["usage"]["completion_tokens"] - 1
    cache = slow.http.get("/v1/cache").raise_for_status().json()
    assert tokens <= sum(node["tokens"] for node in cache["nodes"]) == cache["cached"] + cache["active"]
    assert cache["free"] + cache["cached"] + cache["active"] == cache["capacity"]
    async with open_page(slow.url, "/console#live") as page:
        await expect(page.locator("[data-kv=cached]")).to_have_text(f"{cache['cached']:,}")
        await expect(page.locator("svg.tree rect")).to_have_count(len(cache["nodes"]))
        await expect(page.locator("#panel-requests .state").last).to_have_text("completed")


async def test_waiting_behind_a_gateway(open_page: Open, one_place: GatewayUnderTest) -> None:
    """One worker with one place: two others wait, and the second of them moves up when the first is served."""
    url = one_place.url
    async with open_page(url) as first, open_page(url) as second, open_page(url) as third:
        await expect(first.locator("#kind")).to_have_text("gateway")
        for page in (first, second):
            await page.get_by_label("Max tokens").fill("2000")
        node = await say(first, "Go on for ever.", 0)
        await expect(node.locator(".answer .text")).not_to_be_empty()
        await say(second, "Me too.", 0)
        await expect(second.get_by_text("Waiting: position 1")).to_be_visible()
        await third.get_by_label("Max tokens").fill("3")
        last = await say(third, "And I?", 0)
        await expect(third.get_by_text("Waiting: position 2")).to_be_visible()
        await first.get_by_role("button", name="Stop").click()
        await expect(third.get_by_text("Waiting: position 1")).to_be_visible()
        await second.get_by_role("button", name="Stop").click()
        await expect(last).to_have_attribute("data-state", "done")


async def test_the_live_view_of_a_gateway(open_page: Open, one_place: GatewayUnderTest) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    one_place.http.post("/v1/chat/completions", json=body).raise_for_status()
    async with open_page(one_place.url, "/console#live") as page:
        await expect(page.locator("#panel-workers tbody tr")).to_have_count(1)
        await expect(page.locator("#panel-workers tbody")).to_contain_text("w1")
        await expect(page.locator("#panel-routes tbody tr").first).to_contain_text("load")
        await expect(page.locator("#panel-requests .state").last).to_have_text("completed")
