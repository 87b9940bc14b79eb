"""Multi-turn chats on two workers: time to first token through the gateway, and behind round-robin.

    python benchmarks/routing.py --chats 16 --turns 6

Each chat has a system prompt of its own and waits for an answer before its next turn. Round-robin sends each request to
the next worker, straight, without a process in between, which favours it. The gateway knows no more than what a
request says: chats go over /v1/chat/completions without a session id ("prefix"), or over WebSockets ("sessions").
Workers, prompts and answers are the same; caches are emptied before each run, and modes take turns within a round.
Greedy answers must be equal in all modes. The clock of a turn runs from the send to the first text; first turns, which
no cache can help, are listed apart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.launch.gateway import GatewayUnderTest

Messages = list[dict[str, str]]
WORDS = [
    "loom",
    "thread",
    "river",
    "stone",
    "amber",
    "cloud",
    "winter",
    "garden",
    "silver",
    "mountain",
    "paper",
    "window",
    "harbour",
    "lantern",
    "orchard",
]


def system_prompt(chat: int, words: int) -> str:
    chooser = random.Random(chat)
    return f"Chat {chat}. " + " ".join(chooser.choice(WORDS) for _ in range(words))


class Times:
    """Seconds to the first text, of first and of later turns; cached tokens and prompt tokens of later ones."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.later: list[float] = []
        self.cached = self.prompt = 0

    def add(self, turn: int, seconds: float, cached: int, prompt: int) -> None:
        (self.later if turn else self.first).append(seconds)
        if turn:
            self.cached += cached
            self.prompt += prompt


async def over_http(
    client: httpx.AsyncClient, url: str, messages: Messages, tokens: int
) -> tuple[str, float, int, int]:
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    text, first, usage = "", 0.0, {}
    start = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                event = json.loads(line[6:])
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                usage = event.get("usage") or usage
    return text, first, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


async def over_session(ws: Any, messages: Messages, tokens: int) -> tuple[str, float, int, int]:
    text, first = "", 0.0
    start = time.perf_counter()
    await ws.send(json.dumps({"type": "prefill", "messages": messages}))
    while (frame := json.loads(await ws.recv()))["type"] != "prefill_done":
        assert frame["type"] != "error", frame
    prefilled = frame
    await ws.send(json.dumps({"type": "generate", "max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}))
    while (frame := json.loads(await ws.recv()))["type"] != "done":
        assert frame["type"] == "chunk", frame
        if frame["text_delta"]:
            first = first or time.perf_counter() - start
            text += frame["text_delta"]
    cached = prefilled["cached_tokens"]
    return text, first, cached, cached + prefilled["input_tokens"]


async def run(
    mode: str, gateway: str, next_url: Callable[[], str], args: argparse.Namespace
) -> tuple[Times, list[str]]:
    times, answers = Times(), [""] * args.chats
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def talk(chat: int) -> None:
            messages: Messages = [{"role": "system", "content": system_prompt(chat, args.words)}]
            ws = None
            if mode == "sessions":
                ws = await connect(f"ws{gateway[4:]}/ws/streaming/{chat}", compression=None, proxy=None)
            for turn in range(args.turns):
                messages.append({"role": "user", "content": f"Turn {turn}: what is {chat} plus {turn}?"})
                if ws is not None:
                    text, *numbers = await over_session(ws, messages, args.tokens)
                else:
                    url = gateway if mode == "prefix" else next_url()
                    text, *numbers = await over_http(client, url, messages, args.tokens)
                times.add(turn, *numbers)
                messages.append({"role": "assistant", "content": text})
                answers[chat] += text + "\n"
            if ws is not None:
                await ws.close()

        await asyncio.gather(*(talk(chat) for chat in range(args.chats)))
    return times, answers


def forget(gateway: GatewayUnderTest) -> None:
    for kept in gateway.http.get("/v1/sessions").json()["sessions"]:
        gateway.http.delete(f"/v1/sessions/{kept['id']}")
    gateway.http.post("/flush_cache").raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--words", type=int, default=400, help="of each system prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    settings = [
        word for pair in ("log.level=warning", "http.request_timeout_s=null", *args.set) for word in ("--set", pair)
    ]
    model = [args.model] if args.model else ["--dtype", "float32"]
    with GatewayUnderTest(*model, "--spawn", "2", *settings) as gateway:
        urls = itertools.cycle(worker["url"] for worker in gateway.workers())
        modes = ["round-robin", "prefix", "sessions"]
        found: dict[str, list[Times]] = {mode: [] for mode in modes}
        expected: list[str] | None = None
        for number in range(args.rounds + 1):
            for mode in modes[number % 3 :] + modes[: number % 3]:
                forget(gateway)
                times, answers = asyncio.run(run(mode, gateway.url, lambda: next(urls), args))
                expected = expected or answers
                assert answers == expected, f"{mode}: other answers"
                if number:  # the first round warms up
                    found[mode].append(times)
        for mode in modes:
            rounds = found[mode]
            later = statistics.median(statistics.median(times.later) for times in rounds) * 1e3
            tail = statistics.median(sorted(times.later)[int(0.9 * len(times.later))] for times in rounds) * 1e3
            first = statistics.median(statistics.median(times.first) for times in rounds) * 1e3
            share = sum(times.cached for times in rounds) / max(1, sum(times.prompt for times in rounds))
            print(
                f"{mode:12}  first turn {first:7.1f} ms   later turns {later:7.1f} ms median, {tail:7.1f} ms 90th"
                f"   {share:.1%} of later prompts cached"
            )


if __name__ == "__main__":
    main()
