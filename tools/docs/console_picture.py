"""Writes docs/images/console.png and console-live.png: `PYTHONPATH=src:. python tools/docs/console_picture.py`.

What they show is real: `weft gateway --spawn 2` with the bundled demo model, a chat in one tab, and some other clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright
from websockets.asyncio.client import connect

from tests.console.conftest import ARGUMENTS, CHROMIUM
from tests.launch.gateway import GatewayUnderTest

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
SAMPLES = 90  # of the live view's history
OTHERS = 6
TALK = ["My name is Mira.", "What is 17 plus 25?", "What is my name?", "Tell me a long story."]


async def other(url: str, number: int) -> None:
    """A client that talks without end."""
    system = {
        "role": "system",
        "content": "You are a careful assistant. " + "Answer briefly. " * (5 + 3 * (number % 3)),
    }
    async with connect(f"ws{url[4:]}/ws/streaming/other-{number}", proxy=None) as ws:
        while True:
            messages = [system]
            for turn in range(6):
                messages.append({"role": "user", "content": f"Count from {number} to {number + 20 + turn}."})
                await ws.send(json.dumps({"type": "prefill", "messages": messages}))
                text = ""
                while (frame := json.loads(await ws.recv()))["type"] != "done":
                    if frame["type"] == "prefill_done":
                        await ws.send('{"type": "generate", "temperature": 0, "max_new_tokens": 60}')
                    text += frame.get("text_delta") or ""
                messages.append({"role": "assistant", "content": text})


async def chat(page: Any) -> None:
    """A few turns, and the last answer in its middle."""
    await page.get_by_label("Temperature").fill("0")
    for i, question in enumerate(TALK):
        await page.get_by_label("Message").fill(question)
        await page.keyboard.press("Enter")
        turn = page.locator(".turn").nth(i)
        last = i == len(TALK) - 1
        await (turn.locator(".answer .text", has_text=" ") if last else turn.locator("[data-fact=elapsed]")).wait_for()


async def take(url: str, folder: Path, scheme: str) -> None:
    """Both pictures of the server at `url`."""
    folder.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = await browser.new_page(viewport=SIZE, color_scheme=scheme)
        await page.goto(f"{url}/console")
        await page.locator("#kind").wait_for()
        await chat(page)
        await page.screenshot(path=folder / "console.png", animations="disabled")
        others = [asyncio.create_task(other(url, number)) for number in range(OTHERS)]
        page = await browser.new_page(viewport=SIZE, color_scheme=scheme)
        await page.clock.install()
        await page.goto(f"{url}/console#live")
        await page.locator("#panel-sessions table, #panel-sessions p").first.wait_for()
        for _ in range(SAMPLES):
            async with page.expect_response("**/v1/cache"):
                await page.clock.run_for(1000)
        await page.screenshot(path=folder / "console-live.png", animations="disabled")
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the pictures of the console.")
    parser.add_argument("--to", type=Path, default=IMAGES, help="folder")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    options = parser.parse_args()
    with GatewayUnderTest("--spawn", "2", "--set", "log.level=warning") as gateway:
        asyncio.run(take(gateway.url, options.to, options.scheme))


if __name__ == "__main__":
    main()
