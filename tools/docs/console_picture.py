"""Writes docs/images/console.png and console-live.png: `PYTHONPATH=src:. python tools/docs/console_picture.py`.

Without `--url` against the scripted gateway of the tests, so that the pictures are the same each time; with it against
a worker or gateway that runs there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright

from tests.console.conftest import ARGUMENTS, CHROMIUM
from tests.console.scripted import Scripted, Turn

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
SAMPLES = 90  # of the live view's history
SYSTEM = "You are a patient weaver. Answer briefly, and name the tools you would use."
TALK = [
    (
        "What is the difference between warp and weft?",
        "The warp is the set of threads held under tension on the loom; they run the length of the cloth. "
        "The weft is the thread that the shuttle carries across them, over and under, row by row.\n\n"
        "Tools: a loom for the warp, a shuttle for the weft, and a beater to press each row home.",
    ),
    (
        "And why does the warp have to be the stronger of the two?",
        "It is stretched the whole time, and every row rubs against it: the heddles lift it, the beater scrapes it. "
        "The weft is only laid in and never pulled tight, so it may be softer, thicker or even unspun.",
    ),
    ("Write me a short rhyme to remember that.", "Warp stands firm from beam to beam,\nWeft runs"),
]


@contextlib.asynccontextmanager
async def scripted() -> AsyncIterator[str]:
    """A gateway that says what `TALK` says, and is in the middle of the last answer."""
    async with Scripted(gateway=True).serve() as server:
        for i, (_, answer) in enumerate(TALK):
            pieces = [word + " " for word in answer.split(" ")]
            pieces[-1] = pieces[-1].rstrip()
            unfinished = i == len(TALK) - 1
            server.turns.append(
                Turn([*pieces, " free"] if unfinished else pieces, pause_at=len(pieces) if unfinished else None)
            )
        yield server.url


async def chat(page: Any) -> None:
    await page.get_by_label("System prompt").fill(SYSTEM)
    await page.get_by_label("Temperature").fill("0.7")
    for i, (question, answer) in enumerate(TALK):
        await page.get_by_label("Message").fill(question)
        await page.keyboard.press("Enter")
        if i < len(TALK) - 1:
            await page.locator(".turn").nth(i).locator("[data-fact=elapsed]").wait_for()
        else:
            await page.get_by_text(answer.split("\n")[-1]).wait_for()


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
        page = await browser.new_page(viewport=SIZE, color_scheme=scheme)
        await page.clock.install()
        await page.goto(f"{url}/console#live")
        await page.locator("#panel-sessions table, #panel-sessions p").first.wait_for()
        for _ in range(SAMPLES):
            async with page.expect_response("**/v1/cache"):
                await page.clock.run_for(1000)
        await page.screenshot(path=folder / "console-live.png", animations="disabled")
        await browser.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the pictures of the console.")
    parser.add_argument("--url", help="of a running worker or gateway")
    parser.add_argument("--to", type=Path, default=IMAGES, help="folder")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    options = parser.parse_args()
    async with contextlib.AsyncExitStack() as stack:
        url = options.url or await stack.enter_async_context(scripted())
        await take(url, options.to, options.scheme)


if __name__ == "__main__":
    asyncio.run(main())
