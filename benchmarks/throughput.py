"""Tokens per second of `weft serve` over HTTP, beside `transformers` on the same weights in the same run.

    python benchmarks/throughput.py --model demo
    python benchmarks/throughput.py --model qwen3-0.6b --folder /tmp/qwen3-0.6b
    python benchmarks/throughput.py --against scheduler.overlap=true

Work: N streams at once, each 32 random tokens in and 64 out (`ignore_eos`), and one prompt of 1,024 tokens with one
token out, cache flushed before. Rounds alternate between the two, the median counts. Time runs from the first send to
the last answer. Peer: `transformers` `generate` with a batch of the same prompts. Outputs are checked: every answer has
all its tokens, and the greedy answer of one prompt is compared with the peer's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.shapes import DEMO, write_qwen3_06b
from tests.launch.worker import Worker

PROMPT_TOKENS, OUTPUT_TOKENS, LONG_TOKENS = 32, 64, 1024
STREAMS = (1, 8, 32)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, 4000, size=(count, length)).tolist()


class Weft:
    """The server under test."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._worker = Worker(str(folder), *(w for s in settings for w in ("--set", s)), backend="torch")
        self._worker.__enter__()

    def generate(self, batch: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of every prompt."""
        self._worker.http.post("/flush_cache").raise_for_status()
        return asyncio.run(self._generate(batch, max_tokens))

    async def _generate(self, batch: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self._worker.url, timeout=600) as http:
            start = time.perf_counter()
            answers = await asyncio.gather(
                *(http.post("/generate", json={"input_ids": ids, "sampling_params": params}) for ids in batch)
            )
            seconds = time.perf_counter() - start
        return seconds, [answer.raise_for_status().json()["output_ids"] for answer in answers]

    def close(self) -> None:
        self._worker.__exit__(None, None, None)


class Transformers:
    """The peer: the library's own generate, same weights, same threads."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()

    def generate(self, batch: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        ids = self._torch.tensor(batch)
        start = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - start, out[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        del self._model


def measure(engines: dict[str, Weft | Transformers], rounds: int) -> list[tuple[str, dict[str, float]]]:
    """(work, engine -> tokens per second), medians over interleaved rounds."""
    works: list[tuple[str, list[list[int]], int, Callable[[float, int], float]]] = [
        (f"{n} streams, tokens/s out", prompts(n, PROMPT_TOKENS, n), OUTPUT_TOKENS, lambda s, n: n * OUTPUT_TOKENS / s)
        for n in STREAMS
    ]
    works.append(("prefill 1,024, tokens/s in", prompts(1, LONG_TOKENS, 7), 1, lambda s, n: n * LONG_TOKENS / s))
    table = []
    for name, batch, max_tokens, rate in works:
        rates: dict[str, list[float]] = {engine: [] for engine in engines}
        for round_number in range(rounds + 1):
            for engine, runner in engines.items():
                seconds, outputs = runner.generate(batch, max_tokens)
                assert all(len(tokens) == max_tokens for tokens in outputs), f"{engine}: short answers"
                if round_number:  # the first one warms up
                    rates[engine].append(rate(seconds, len(batch)))
        table.append((name, {engine: statistics.median(values) for engine, values in rates.items()}))
    return table


def agreement(engines: dict[str, Weft | Transformers]) -> str:
    """How long the greedy answers agree; in bfloat16 a near-tie may part them."""
    answers = [engine.generate(prompts(1, PROMPT_TOKENS, 99), OUTPUT_TOKENS)[1][0] for engine in engines.values()]
    same = next((i for i, pair in enumerate(zip(*answers, strict=True)) if len(set(pair)) > 1), OUTPUT_TOKENS)
    return f"greedy answers agree for {same} of {OUTPUT_TOKENS} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["demo", "qwen3-0.6b"], default="demo")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/weft-bench-qwen3-0.6b"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", metavar="KEY=VALUE", help="the peer is Weft with this setting")
    arguments = parser.parse_args()
    folder = DEMO if arguments.model == "demo" else write_qwen3_06b(arguments.folder)
    engines: dict[str, Weft | Transformers] = {"weft": Weft(folder)}
    peer = arguments.against or "transformers"
    engines[peer] = Weft(folder, peer) if arguments.against else Transformers(folder)
    try:
        print(f"| {arguments.model} | {' | '.join(engines)} | ratio |")
        print("|---" * (len(engines) + 2) + "|")
        for name, rates in measure(engines, arguments.rounds):
            ratio = rates["weft"] / rates[peer]
            print(f"| {name} | {' | '.join(f'{rate:.0f}' for rate in rates.values())} | {ratio:.2f} |", flush=True)
        print(agreement(engines))
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
