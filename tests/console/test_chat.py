"""The chat in a real browser, against a server that does what the test says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.console.conftest import Open
from tests.console.scripted import Scripted, Turn

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.async_api import Page, expect  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = '<img src=x onerror="document.title=`hacked`"><script>document.title="hacked"</script> **bold** &amp;'
SOUNDS = """
  window.sounds = [];
  window.AudioContext = class {
    constructor() { this.currentTime = 0; this.state = "running"; this.destination = {}; }
    createBuffer(channels, length, rate) {
      return { duration: length / rate, copyToChannel: (data) => { this.peak = Math.max(...data); } };
    }
    createBufferSource() {
      return { connect() {}, stop() { this.onended(); },
               start: function (at) { window.sounds.push([at, this.buffer.duration]); window.lastSource = this; } };
    }
  };
"""


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send").click()


def turn(page: Page, number: int) -> Any:
    return page.locator(".turn").nth(number)


async def ended(page: Page, number: int, state: str = "done") -> Any:
    node = turn(page, number)
    await expect(node).to_have_attribute("data-state", state)
    return node


async def facts(node: Any) -> dict[str, str]:
    return {
        await f.get_attribute("data-fact"): await f.locator("b").inner_text() for f in await node.locator(".fact").all()
    }


async def test_two_turns(open_page: Open, worker: Scripted) -> None:
    async with open_page(worker.url) as page:
        await expect(page.locator("#model")).to_have_text("weft-demo")
        await expect(page.locator("#kind")).to_have_text("worker")
        await say(page, "Is this a test?")
        first = await ended(page, 0)
        await expect(first.locator(".answer .text")).to_have_text("Yes, indeed.")
        assert (await facts(first))["cached"] == "0"
        await say(page, "Once more?")
        told = await facts(await ended(page, 1))
    assert told == {"cached": "8", "input": "3", "generated": "2", "elapsed": "1,234 ms", "first": told["first"]}
    second = worker.sent("prefill")[1]
    assert [message["content"] for message in second["messages"]] == ["Is this a test?", "Yes, indeed.", "Once more?"]
    assert len(worker.connections) == 1


async def test_a_gateway_is_told_whole_conversations_and_tells_the_route(open_page: Open, gateway: Scripted) -> None:
    async with open_page(gateway.url) as page:
        await expect(page.locator("#kind")).to_have_text("gateway")
        await say(page, "Hello")
        await ended(page, 0)
        await say(page, "Again")
        node = await ended(page, 1)
        await expect(node.locator("[data-fact=route]")).to_have_text("loom-1 longest cached history")
    assert [len(frame["messages"]) for frame in gateway.sent("prefill")] == [1, 3]


async def test_stop(open_page: Open, worker: Scripted) -> None:
    worker.turns.append(Turn(["One", " two", " three"], pause_at=2))
    async with open_page(worker.url) as page:
        await say(page, "Count")
        await expect(turn(page, 0).locator(".answer .text")).to_have_text("One two")
        await expect(turn(page, 0).locator(".answer")).to_have_attribute("aria-busy", "true")
        await page.get_by_role("button", name="Stop").click()
        node = await ended(page, 0, "stopped")
        await expect(node.locator(".answer .text")).to_have_text("One two")
        await expect(node.locator(".answer")).to_have_attribute("aria-busy", "false")
        await say(page, "And then?")
        await ended(page, 1)
    assert len(worker.sent("stop")) == 1
    assert [m["content"] for m in worker.sent("prefill")[1]["messages"]] == ["Count", "One two", "And then?"]
    assert len(worker.connections) == 1


async def test_the_position_in_the_queue_falls(open_page: Open, gateway: Scripted) -> None:
    gateway.turns.append(Turn(queue=[3, 2, 1]))
    async with open_page(gateway.url) as page:
        await say(page, "Hello")
        place = page.locator(".place")
        for text in ("3 of 3, about 7.5 s", "2 of 3, about 5.0 s", "1 of 3, about 2.5 s"):
            await expect(place).to_have_text(f"Waiting: position {text}")
            gateway.go()
        await ended(page, 0)
        await expect(place).to_have_count(0)


@pytest.mark.parametrize("how", ["Cancel", "Escape"])
async def test_a_ticket_is_cancelled(open_page: Open, gateway: Scripted, how: str) -> None:
    gateway.turns.append(Turn(queue=[2]))
    async with open_page(gateway.url) as page:
        await say(page, "Never mind")
        await expect(page.locator(".place")).to_be_visible()
        if how == "Cancel":
            await page.get_by_role("button", name="Cancel").click()
        else:
            await page.keyboard.press("Escape")
        node = await ended(page, 0, "cancelled")
        await expect(node.locator(".problem")).to_contain_text("Cancelled.")
        await expect(page.get_by_label("Message")).to_have_value("Never mind")
        await say(page, "Hello")
        await ended(page, 1)
    assert len(gateway.cancelled) == 1
    assert [m["content"] for m in gateway.sent("prefill")[1]["messages"]] == ["Hello"]


async def test_a_lost_connection_and_one_retry(open_page: Open, worker: Scripted) -> None:
    worker.turns += [Turn(), Turn(["Par", "tial"], drop_at=1)]
    async with open_page(worker.url) as page:
        await say(page, "First")
        await ended(page, 0)
        await say(page, "Second")
        node = await ended(page, 1, "failed")
        await expect(node.get_by_role("alert")).to_contain_text("The connection was lost.")
        await node.get_by_role("button", name="Retry").click()
        await ended(page, 1)
        await expect(page.locator(".turn")).to_have_count(2)
    retried = worker.sent("prefill")[2]["messages"]
    assert [message["content"] for message in retried] == ["First", "Yes, indeed.", "Second"]
    assert len(worker.connections) == 2


async def test_an_error_is_told_and_leaves_the_chat_usable(open_page: Open, worker: Scripted) -> None:
    worker.turns.append(Turn(error={"code": "queue_full", "message": "the queue is full", "retry_after_s": 7}))
    worker.turns.append(Turn(["a", "b"], error={"code": "engine_error", "message": "it broke"}, error_at=1))
    async with open_page(worker.url) as page:
        await say(page, "One")
        await expect((await ended(page, 0, "failed")).get_by_role("alert")).to_contain_text(
            "the queue is full. Try again in 7.0 s."
        )
        await say(page, "Two")
        await expect((await ended(page, 1, "failed")).get_by_role("alert")).to_contain_text("it broke")
        await expect(page.get_by_role("button", name="Retry")).to_have_count(1)
        await say(page, "Three")
        await ended(page, 2)
    assert [m["content"] for m in worker.sent("prefill")[2]["messages"]] == ["Three"]


async def test_a_session_that_is_busy_for_a_moment_is_tried_again(open_page: Open, worker: Scripted) -> None:
    busy = {"code": "session_busy", "message": "another connection has a turn under way"}
    worker.turns += [Turn(error=busy), Turn(error=busy)]
    async with open_page(worker.url) as page:
        await say(page, "Hello")
        await ended(page, 0)
    assert len(worker.sent("prefill")) == 3


async def test_audio_is_played_without_gaps(open_page: Open, worker: Scripted) -> None:
    worker.turns.append(Turn(audio=3))
    async with open_page(worker.url, script=SOUNDS) as page:
        await page.get_by_label("Speak the answers").check()
        await say(page, "Speak")
        await ended(page, 0)
        sounds = await page.evaluate("window.sounds")
        await expect(page.get_by_role("button", name="Silence")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name="Silence")).to_have_count(0)
    assert len(sounds) == 3
    for (start, duration), (following, _) in zip(sounds, sounds[1:], strict=False):
        assert following == pytest.approx(start + duration) and duration == pytest.approx(0.1)
    assert worker.sent("generate")[0]["generate_audio"] is True


async def test_settings_are_sent_and_kept(open_page: Open, worker: Scripted) -> None:
    async with open_page(worker.url) as page:
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Temperature").fill("0.5")
        await page.get_by_label("Max tokens").fill("64")
        await page.get_by_label("Seed").fill("7")
        await page.reload()
        await say(page, "Hello")
        await ended(page, 0)
        await page.get_by_label("Temperature").fill("5")
        await say(page, "Too hot")
        await expect(page.get_by_label("Temperature")).to_be_focused()
        await expect(page.locator(".turn")).to_have_count(1)
    assert worker.sent("generate") == [{"type": "generate", "temperature": 0.5, "max_new_tokens": 64, "seed": 7}]
    assert worker.sent("prefill")[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert len(worker.sent("prefill")) == 1


async def test_a_new_conversation_begins_with_nothing(open_page: Open, worker: Scripted) -> None:
    async with open_page(worker.url) as page:
        await say(page, "Old")
        await ended(page, 0)
        await page.get_by_role("button", name="New conversation").click()
        await expect(page.locator(".turn")).to_have_count(0)
        await expect(page.get_by_label("Message")).to_be_focused()
        await say(page, "New")
        await ended(page, 0)
    assert [m["content"] for m in worker.sent("prefill")[1]["messages"]] == ["New"]


async def test_a_new_conversation_in_the_middle_of_an_answer(open_page: Open, worker: Scripted) -> None:
    worker.turns.append(Turn(["Once", " upon"], pause_at=1))
    async with open_page(worker.url) as page:
        await say(page, "Old")
        await expect(turn(page, 0).locator(".answer .text")).to_have_text("Once")
        await page.get_by_role("button", name="New conversation").click()
        await expect(page.locator(".turn")).to_have_count(0)
        await say(page, "New")
        await ended(page, 0)
    assert len(worker.sent("stop")) == 1
    assert [m["content"] for m in worker.sent("prefill")[1]["messages"]] == ["New"]


async def test_what_a_model_says_stays_text(open_page: Open, worker: Scripted) -> None:
    worker.turns.append(Turn([HOSTILE[:20], HOSTILE[20:]]))
    async with open_page(worker.url) as page:
        await say(page, HOSTILE)
        node = await ended(page, 0)
        assert await node.locator(".answer .text").inner_text() == HOSTILE
        assert await node.locator(".user .text").inner_text() == HOSTILE
        assert await page.locator("#turns img, #turns script").count() == 0
        assert await page.title() == "Weft console"


async def test_the_key_is_asked_for(open_page: Open) -> None:
    async with Scripted(key="s3cret").serve() as server, open_page(server.url) as page:
        page.watch.allowed.append(r"401 ")
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("API key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("refused that key")
        await dialog.get_by_label("API key").fill("s3cret")
        await dialog.get_by_role("button", name="Continue").click()
        await say(page, "Hello")
        await ended(page, 0)
        await page.reload()
        await say(page, "Still there?")
        await ended(page, 0)
        await expect(dialog).to_have_count(0)
        assert "s3cret" not in await page.content()


async def test_a_key_that_no_websocket_can_carry_is_told(open_page: Open) -> None:
    async with Scripted(key="a/b").serve() as server, open_page(server.url) as page:
        page.watch.allowed.append(r"401 ")
        await page.get_by_label("API key", exact=True).fill("a/b")
        await page.keyboard.press("Enter")
        await say(page, "Hello")
        await expect((await ended(page, 0, "failed")).get_by_role("alert")).to_contain_text("has characters")


async def test_without_a_key_the_page_says_so(open_page: Open) -> None:
    async with Scripted(key="s3cret").serve() as server, open_page(server.url) as page:
        page.watch.allowed.append(r"401 ")
        await page.get_by_role("button", name="Cancel").click()
        await expect(page.get_by_role("alert")).to_contain_text("needs an API key")
        await page.get_by_role("button", name="Try again").click()
        await page.get_by_label("API key", exact=True).fill("s3cret")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_count(0)
        await say(page, "Hello")
        await ended(page, 0)


async def test_keyboard_only(open_page: Open, worker: Scripted) -> None:
    worker.turns += [Turn(), Turn(["Long", " story"], pause_at=1)]
    async with open_page(worker.url) as page:
        message = page.get_by_label("Message")
        await expect(message).to_be_focused()
        await page.keyboard.type("Two")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("lines")
        await page.keyboard.press("Enter")
        await ended(page, 0)
        await expect(message).to_be_focused()
        await page.keyboard.type("Again")
        await page.keyboard.press("Enter")
        await expect(turn(page, 1).locator(".answer .text")).to_have_text("Long")
        await page.keyboard.press("Escape")
        await ended(page, 1, "stopped")
        for name in ("Settings", "Live", "Chat"):
            await page.keyboard.press("Shift+Tab")
            focused = page.locator(":focus")
            await expect(focused).to_have_text(name)
            await expect(focused).to_have_css("outline-style", "solid")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("#live")).to_be_visible()
    assert worker.sent("prefill")[0]["messages"][0]["content"] == "Two\nlines"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_narrow_screen(open_page: Open, gateway: Scripted, scheme: str) -> None:
    word = "w" * 200
    gateway.turns.append(Turn(["A very long word: ", word], queue=[2]))
    size = {"width": 360, "height": 640}
    async with open_page(gateway.url, viewport=size, color_scheme=scheme) as page:
        await expect(page.locator("#settings")).to_be_hidden()
        await say(page, f"Say {word}")
        await expect(page.locator(".place")).to_be_visible()
        assert await overflow(page) == 0
        gateway.go()
        await ended(page, 0)
        assert await overflow(page) == 0
        await page.get_by_role("button", name="Settings").click()
        await expect(page.get_by_label("System prompt")).to_be_focused()
        assert await overflow(page) == 0
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_role("link", name="Live").click()
        await expect(page.locator("#panel-sessions table")).to_be_visible()
        assert await overflow(page) == 0


async def overflow(page: Page) -> int:
    """By how many pixels anything but a table's own box is wider than the screen."""
    script = """() => {
      const width = document.documentElement.clientWidth;
      const nodes = [...document.querySelectorAll("body *")].filter((node) => !node.closest(".scroll table, .unseen"));
      const edges = nodes.map((node) => Math.floor(node.getBoundingClientRect().right));
      return Math.max(document.documentElement.scrollWidth, width, ...edges) - width;
    }"""
    return int(await page.evaluate(script))
