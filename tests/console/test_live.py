"""The live view in a real browser, against scripted answers."""

from __future__ import annotations

import re

import pytest

from tests.console.conftest import Open
from tests.console.scripted import Scripted

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.async_api import Page, expect  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="session")

NODES = [
    {"id": 0, "parent": None, "tokens": 100, "held": "request", "depth": 1, "last_used_s_ago": 0.5},
    {"id": 1, "parent": 0, "tokens": 50, "held": "session", "depth": 2, "last_used_s_ago": 12.0},
    {"id": 2, "parent": 0, "tokens": 20, "held": None, "depth": 2, "last_used_s_ago": None},
    {"id": 3, "parent": 1, "tokens": 50, "held": None, "depth": 3, "last_used_s_ago": 30.0},
]
NUMBER = re.compile(r"^[\d,.]+$")
HIDEABLE = """
  window.setHidden = (hidden) => {
    Object.defineProperty(document, "visibilityState", {
      configurable: true,
      get: () => (hidden ? "hidden" : "visible"),
    });
    document.dispatchEvent(new Event("visibilitychange"));
  };
"""
CACHE = {"capacity": 1000, "free": 700, "cached": 120, "active": 180, "nodes": NODES, "truncated": 1234}


async def test_a_worker(open_page: Open, worker: Scripted) -> None:
    worker.scene.cache = CACHE
    async with open_page(worker.url, "/console#live") as page:
        await expect(page.locator("[data-kv=free]")).to_have_text("700")
        await expect(page.locator("[data-kv=cached]")).to_have_text("120")
        await expect(page.locator("[data-kv=active]")).to_have_text("180")
        assert await widths(page, ".stack i") == pytest.approx([0.18, 0.12, 0.7], abs=0.01)
        for gauge in ("queued", "pending", "processing", "rows", "tokens", "step"):
            await expect(page.locator(f"[data-gauge={gauge}]")).to_have_text(NUMBER)
        await expect(page.locator("#panel-requests tbody tr")).to_have_count(26)
        first = page.locator("#panel-requests tbody tr").first
        await expect(first.locator(".state")).to_have_text("queued")
        await expect(page.locator("#panel-requests .fall rect.processing").first).to_be_visible()
        await expect(page.locator("#panel-sessions tbody tr")).to_have_count(8)
        await expect(page.locator("#panel-workers")).to_have_count(0)


async def test_the_tree_is_drawn_to_scale_and_walked_by_keys(open_page: Open, worker: Scripted) -> None:
    worker.scene.cache = CACHE
    async with open_page(worker.url, "/console#live") as page:
        tree = page.locator("svg.tree")
        await expect(tree.locator("rect")).to_have_count(4)
        box = [await tree.locator(f"[data-node='{i}']").bounding_box() for i in range(4)]
        scale = box[0]["width"] / 100
        for node, drawn in zip(NODES, box, strict=True):
            assert drawn["width"] == pytest.approx(node["tokens"] * scale, abs=3)
        assert box[1]["y"] == box[0]["y"] == box[3]["y"] < box[2]["y"]  # the heaviest child goes on in the row
        assert box[2]["x"] == pytest.approx(box[1]["x"], abs=1)
        told = page.locator(".tree-told")
        await expect(told).to_have_text("4 nodes. 1,234 lighter nodes not shown.")
        await tree.focus()
        await page.keyboard.press("ArrowRight")
        await expect(told).to_contain_text("Tokens 0 to 100 (100), depth 1, held by a request, used 0.5 s ago.")
        await page.keyboard.press("ArrowRight")
        await expect(told).to_contain_text("Tokens 100 to 150 (50), depth 2, held by a session")
        await tree.locator("[data-node='2']").hover()
        await expect(told).to_contain_text("Tokens 100 to 120 (20), depth 2, evictable. 1,234")


async def test_a_gateway_and_its_workers(open_page: Open, gateway: Scripted) -> None:
    async with open_page(gateway.url, "/console#live") as page:
        await expect(page.locator("#panel-workers tbody tr")).to_have_count(3)
        await expect(page.locator("#panel-workers tbody tr").first).to_contain_text("6 / 8")
        await expect(page.locator("#panel-queue tbody tr")).to_have_count(3)
        await expect(page.locator("#panel-routes tbody tr")).to_have_count(12)
        await expect(page.get_by_label("Worker", exact=True)).to_have_value("loom-1")
        await expect(page.locator("[data-kv=free]")).to_be_visible()
        gateway.polls.clear()
        await page.get_by_label("Worker", exact=True).select_option("loom-2")
        async with page.expect_response("**/workers/loom-2/v1/cache"):
            pass
        await expect(page.get_by_label("Worker", exact=True)).to_have_value("loom-2")


async def test_it_asks_only_while_it_is_shown(open_page: Open, worker: Scripted) -> None:
    async with open_page(worker.url, "/console", script=HIDEABLE) as page:
        await expect(page.locator("#kind")).to_have_text("worker")
        await page.clock.install()
        assert "/stats" not in worker.polls
        await page.get_by_role("link", name="Live").click()
        await expect(page.locator("[data-kv=free]")).to_be_visible()
        async with page.expect_response("**/stats"):
            await page.clock.run_for(1100)
        await page.evaluate("window.setHidden(true)")
        asked = await polls(page)
        await page.clock.run_for(10_000)
        assert await polls(page) == asked
        async with page.expect_response("**/stats"):
            await page.evaluate("window.setHidden(false)")
        await page.get_by_role("link", name="Chat").click()
        asked = await polls(page)
        await page.clock.run_for(10_000)
        assert await polls(page) == asked


async def polls(page: Page) -> int:
    """How often the page has asked so far; what it did before another request of its own is counted."""
    await page.evaluate("fetch('/v1/models')")
    return sum(url.endswith("/stats") for url in page.watch.urls)


async def test_what_answers_is_shown_though_something_does_not(open_page: Open, gateway: Scripted) -> None:
    gateway.scene.missing = {"/workers/loom-1/v1/cache"}
    async with open_page(gateway.url, "/console#live") as page:
        page.watch.allowed.append("503 .*/v1/cache")
        await expect(page.get_by_role("status")).to_have_text("no answer from the engine")
        await expect(page.locator("#panel-sessions tbody tr")).to_have_count(8)
        await expect(page.locator("[data-kv=free]")).to_have_count(0)
        gateway.scene.missing = set()
        await expect(page.locator("[data-kv=free]")).to_be_visible()
        await expect(page.get_by_role("status")).to_have_count(0)


async def test_a_server_that_goes_away_is_told(open_page: Open) -> None:
    server = Scripted()
    running = server.serve()
    await running.__aenter__()
    async with open_page(server.url, "/console#live") as page:
        page.watch.allowed.append("ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE")
        await expect(page.locator("[data-kv=free]")).to_be_visible()
        await running.__aexit__(None, None, None)
        await expect(page.get_by_role("status")).to_have_text("The server cannot be reached.")
        await expect(page.locator("[data-kv=free]")).to_be_visible()  # the last numbers stay


async def widths(page: Page, selector: str) -> list[float]:
    """Of the elements' shares of their parent."""
    script = "nodes => nodes.map(n => n.getBoundingClientRect().width / n.parentNode.getBoundingClientRect().width)"
    await page.wait_for_function(
        "sel => document.getAnimations().length === 0 && document.querySelector(sel)", arg=selector
    )
    return await page.locator(selector).evaluate_all(script)


async def test_a_scrolled_table_stays_where_it_is(open_page: Open, worker: Scripted) -> None:
    async with open_page(worker.url, "/console#live") as page:
        box = page.get_by_role("group", name="Requests")
        await expect(box.locator("tbody tr")).to_have_count(26)
        await box.focus()
        await page.keyboard.press("End")
        await page.wait_for_function("() => document.querySelector('#panel-requests .scroll').scrollTop > 100")
        async with page.expect_response("**/v1/requests"):
            pass
        async with page.expect_response("**/v1/requests"):
            pass
        await expect(box).to_be_focused()
        assert await box.evaluate("node => node.scrollTop") > 100
