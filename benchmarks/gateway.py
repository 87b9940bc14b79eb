"""What the gateway costs: the same worker straight and through `weft gateway`, in turns, on the fake backend.

    python benchmarks/gateway.py --clients 64

Latency: one client, short answers one after another, streamed to the first token; the difference of the medians.
Throughput: N streams at once. `--pace` slows the engine to so many tokens per second for each stream, as a model would
be; without it the engine is infinitely fast and both cores are full: all that the gateway does is taken from the
worker. Each round measures both ways; ratios are of the same round. Outputs are checked as in `http_tokens.py`, and one
answer through the gateway is compared with the one straight.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.http_tokens import PATH, body, check, run
from tests.launch.gateway import GatewayUnderTest
from tests.launch.worker import Worker


async def first_tokens(url: httpx.URL, answers: int) -> list[float]:
    _, clients = await run(url, 1, answers, 2)
    return clients[0].first_token_s


def same_answer(straight: httpx.Client, through: httpx.Client) -> None:
    asked = body(0, 0, 32) | {"temperature": 0, "stream": False, "stream_options": None}
    texts = [
        http.post(PATH, json=asked).raise_for_status().json()["choices"][0]["text"] for http in (straight, through)
    ]
    assert texts[0] == texts[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pace", type=float, help="tokens per second and stream")
    args = parser.parse_args()
    settings = ["--set", "http.max_concurrent_requests=64", "--set", "log.level=warning"]
    if args.pace is not None:
        settings += ["--set", f"backend.fake.tokens_per_s={args.pace * args.clients}"]
    with Worker(*settings) as worker, GatewayUnderTest("--worker", worker.url) as gateway:
        urls = [httpx.URL(worker.url), httpx.URL(gateway.url)]
        for http in (worker.http, gateway.http):
            check(http, 32)
        same_answer(worker.http, gateway.http)
        ratios: list[float] = []
        for number in range(args.rounds + 1):
            rates = []
            for url in urls if number % 2 else reversed(urls):
                seconds, _ = asyncio.run(run(url, args.clients, args.answers, args.tokens))
                rates.append(args.clients * args.answers * args.tokens / seconds)
            straight, through = rates if number % 2 else reversed(rates)
            if number:  # the first one warms up
                ratios.append(through / straight)
                print(
                    f"{straight:9.0f} tokens/s straight {through:9.0f} through  x{through / straight:.3f}", flush=True
                )
        medians = []
        for _ in range(3):
            medians.append([statistics.median(asyncio.run(first_tokens(url, 300))) * 1e3 for url in urls])
        added = [through - straight for straight, through in medians]
        print(f"throughput x{statistics.median(ratios):.3f} (median of {len(ratios)} rounds)")
        straight, through = medians[-1]
        print(f"first token {straight:.2f} ms straight, {through:.2f} through: {min(added):+.2f} to {max(added):+.2f}")


if __name__ == "__main__":
    main()
