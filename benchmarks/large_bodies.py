"""How long a large or odd body holds up the requests of others, over HTTP, on the infinitely fast fake backend.

    python benchmarks/large_bodies.py

While a body of each shape is sent and answered, two others go on: `/health` again and again (the event loop), and short
completions one after another (event loop, text process, engine). Shown is the slowest answer of each less the slowest
without the large body, in milliseconds, as the median of three rounds. A client in a process of its own sends the large
body; all of them share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.shapes import DEMO
from tests.launch.worker import Worker

SETTLE_S = 0.5

Body = Callable[[], tuple[str, bytes]]


def _json(path: str, **fields: Any) -> tuple[str, bytes]:
    return path, json.dumps(fields).encode()


def _words(characters: int) -> str:
    return ("The quick brown fox jumps over the lazy dog. " * (characters // 45 + 1))[:characters]


SHAPES: dict[str, Body] = {
    "prompt of 400,000 characters": lambda: _json("/v1/completions", prompt=_words(400_000), max_tokens=4),
    "prompt of 5,000,000 characters": lambda: _json("/v1/completions", prompt=_words(5_000_000), max_tokens=4),
    "one word of 5,000,000 letters": lambda: _json("/v1/completions", prompt="a" * 5_000_000, max_tokens=4),
    "prompt of 100,000 token ids": lambda: _json("/v1/completions", prompt=[7] * 100_000, max_tokens=4),
    "the same, n = 16": lambda: _json("/v1/completions", prompt=[7] * 100_000, max_tokens=4, n=16),
    "2,000 prompts": lambda: _json("/v1/completions", prompt=["hello there"] * 2000, max_tokens=1),
    "10,000 messages": lambda: _json(
        "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}] * 10_000, max_tokens=4
    ),
    "900,000 empty objects": lambda: ("/v1/chat/completions", b'{"messages": [' + b"{}," * 900_000 + b"{}]}"),
    "16,000,000 characters as escapes": lambda: (
        "/v1/completions",
        b'{"max_tokens": 1, "prompt": "' + b"\\u0041" * 5_300_000 + b'"}',
    ),
    "100,000 nested lists": lambda: ("/v1/completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "30 MB that is no JSON": lambda: ("/v1/completions", b"x" * 30_000_000),
    "300,000 logit biases": lambda: _json(
        "/v1/completions", prompt="x", max_tokens=1, logit_bias={str(i): 1 for i in range(300_000)}
    ),
    "tokenize 2,000,000 characters": lambda: _json("/tokenize", prompt=_words(2_000_000)),
    "echo with 20 logprobs, 8,000 tokens": lambda: _json(
        "/v1/completions", prompt=[7] * 8000, max_tokens=1, echo=True, logprobs=20
    ),
}


def _send(url: str, path: str, file: str, pipe: Connection) -> None:
    """The client with the large body: reports twice, when it is ready and when it was answered."""
    body = Path(file).read_bytes()
    with httpx.Client(base_url=url, timeout=300) as http:
        http.get("/health")
        pipe.send("")
        pipe.recv()
        start_s = time.perf_counter()
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        pipe.send(f"{answer.status_code} in {time.perf_counter() - start_s:.1f} s")


class Others:
    """The requests that must not notice: run until `stop`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._stopped = False
        self.worst = {"health": 0.0, "short": 0.0}

    def stop(self) -> None:
        self._stopped = True

    async def run(self) -> None:
        await asyncio.gather(self._health(), self._short())

    async def _timed(self, name: str, ask: Callable[[], Any]) -> None:
        while not self._stopped:
            start_s = time.perf_counter()
            answer = await ask()
            self.worst[name] = max(self.worst[name], time.perf_counter() - start_s)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.005)

    async def _health(self) -> None:
        await self._timed("health", lambda: self._http.get("/health"))

    async def _short(self) -> None:
        body = {"prompt": "A short one.", "max_tokens": 1, "temperature": 0}
        await self._timed("short", lambda: self._http.post("/v1/completions", json=body))


async def measure(url: str, path: str, file: str) -> tuple[dict[str, float], str]:
    """The worst of each, in seconds, and how the large body was answered; without a path, of two quiet seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        others = Others(http)
        running = asyncio.create_task(others.run())
        answered = ""
        if not path:
            await asyncio.sleep(SETTLE_S)
            others.worst = dict.fromkeys(others.worst, 0.0)
            await asyncio.sleep(2.0)
        else:
            spawn = multiprocessing.get_context("spawn")
            pipe, far_end = spawn.Pipe()
            sender = spawn.Process(target=_send, args=(url, path, file, far_end))
            await asyncio.to_thread(sender.start)
            await asyncio.to_thread(pipe.recv)
            await asyncio.sleep(SETTLE_S)
            others.worst = dict.fromkeys(others.worst, 0.0)
            pipe.send("go")
            answered = await asyncio.to_thread(pipe.recv)
            await asyncio.sleep(SETTLE_S)
        worst = dict(others.worst)
        others.stop()
        await running
        if path:
            await asyncio.to_thread(sender.join)
        return worst, answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=131072, help="longest sequence, in tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, file = Path(folder) / "model", Path(folder) / "body"
        _copy_model(model, options.context)
        with Worker(str(model), "--set", f"kv_cache.max_items={2 * options.context}") as worker:
            _report(worker.url, options.only, options.rounds, file)


def _copy_model(folder: Path, context_tokens: int) -> None:
    """The demo model's tokenizer with a context of this length."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.gguf"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = context_tokens
    (folder / "config.json").write_text(json.dumps(config))


def _report(url: str, only: str, rounds: int, file: Path) -> None:
    base, _ = asyncio.run(measure(url, "", ""))
    print("| body | answered | `/health`, ms | short completion, ms |\n|---|---|---|---|")
    print("| (slowest without one) | | " + " | ".join(f"{s * 1000:.0f}" for s in base.values()) + " |")
    for name, shape in SHAPES.items():
        if only not in name:
            continue
        path, body = shape()
        file.write_bytes(body)
        results = [asyncio.run(measure(url, path, str(file))) for _ in range(rounds)]
        cells = [statistics.median(worst[what] for worst, _ in results) - base[what] for what in base]
        print(f"| {name} | {results[-1][1]} | {' | '.join(f'{max(0.0, s) * 1000:.0f}' for s in cells)} |", flush=True)


if __name__ == "__main__":
    main()
