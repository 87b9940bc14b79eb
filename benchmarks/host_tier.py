"""When the second tier of KV pays: cold cells against step time, moving against computing, and conversations that take
turns over HTTP.

    python benchmarks/host_tier.py

Model: random weights in Qwen3-0.6B's shape (benchmarks/shapes.py), Q8_0, KV in float16. Three tables:

1. A decode step at 1 and 8 streams of 256 tokens, with cold cells beside them. The cold cells are copies of a real
   piece under other sequence ids. Settings alternate over rounds; medians.
2. Prefill of 1,024 tokens, and the same tokens going to host memory and coming back.
3. Conversations of 768 tokens each, visited in turn, two visits each after the first; the cache has room for a third of
   them. Seconds from request to answer of 4 tokens, later visits only. Random weights make near ties, which float16
   cells and the shapes of steps can turn; how many answers are the same is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.pop(0)  # this folder: llama_cpp.py would hide the package
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.llama_cpp import random_ids
from benchmarks.shapes import write_qwen3_06b_gguf
from tests.launch.worker import Worker
from weft.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions
from weft.core.plan import PIECE_TOKENS, KvOp

STREAMS, COLD_TOKENS = (1, 8), (0, 1024, 4096, 16384, 30720)
SEQUENCES, CELLS = 200, 40960
CONVERSATIONS, LENGTH, VISITS, CAPACITY = 12, 768, 3, 4096


class Cells:
    """A backend without a scheduler: sequences are filled and emptied by hand."""

    def __init__(self, model: Path) -> None:
        self.backend = LlamaCppBackend(model, LlamaCppOptions(num_sequences=SEQUENCES, host_pieces=True))
        self.backend.load()
        self.backend.allocate_kv(CELLS)

    def compute(self, sequences: list[int], tokens: np.ndarray, start: int) -> float:
        """`tokens` int32 [sequences, n] at positions from `start` on; seconds."""
        count = tokens.shape[1]
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), len(sequences))
        wanted = (positions == start + count - 1).astype(bool)
        ids = np.repeat(np.array(sequences, dtype=np.int32), count)
        began_s = time.perf_counter()
        batch = self.backend._batch.fill(tokens.reshape(-1), positions, ids, wanted)
        assert self.backend._library.llama_decode(self.backend._context, batch) == 0
        self.backend._library.llama_get_logits(self.backend._context)
        for sequence in sequences:
            self.backend._lengths[sequence] = start + count
        return time.perf_counter() - began_s

    def do(self, *ops: KvOp) -> float:
        began_s = time.perf_counter()
        self.backend.rearrange(ops)
        return time.perf_counter() - began_s

    def clear(self) -> None:
        self.do(*(KvOp("remove", sequence, 0, -1) for sequence in range(SEQUENCES)))


def step_times(cells: Cells, rng: np.random.Generator, rounds: int) -> None:
    first = np.array(random_ids(rng, 1, PIECE_TOKENS), dtype=np.int32)
    cells.compute([0], first, 0)
    cells.do(KvOp("save", 0, 0, PIECE_TOKENS, piece=0))
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(rounds):
        for cold in COLD_TOKENS:
            cells.clear()
            for index in range(max(STREAMS) + cold // PIECE_TOKENS):
                cells.do(KvOp("load", index, 0, PIECE_TOKENS, piece=0))
            for streams in STREAMS:
                for step in range(6):
                    tokens = np.array(random_ids(rng, streams, 1), dtype=np.int32)
                    seconds = cells.compute(list(range(streams)), tokens, PIECE_TOKENS + step)
                    times.setdefault((cold, streams), []).append(seconds)
                cells.do(*(KvOp("remove", sequence, PIECE_TOKENS, -1) for sequence in range(streams)))
    print("| cold tokens | " + " | ".join(f"step, {n} streams (ms)" for n in STREAMS) + " |")
    print("|---|" + "---|" * len(STREAMS))
    for cold in COLD_TOKENS:
        print(f"| {cold} | " + " | ".join(f"{1000 * statistics.median(times[cold, n]):.0f}" for n in STREAMS) + " |")


def moving(cells: Cells, rng: np.random.Generator, rounds: int) -> None:
    pieces = range(1024 // PIECE_TOKENS)
    times: dict[str, list[float]] = {"computed": [], "saved": [], "restored": []}
    for _ in range(rounds):
        cells.clear()
        tokens = np.array(random_ids(rng, 1, 1024), dtype=np.int32)
        seconds = sum(cells.compute([0], tokens[:, at : at + 512], at) for at in (0, 512))
        times["computed"].append(seconds)
        ranges = [(piece * PIECE_TOKENS, (piece + 1) * PIECE_TOKENS) for piece in pieces]
        times["saved"].append(cells.do(*(KvOp("save", 0, a, b, piece=1 + n) for n, (a, b) in enumerate(ranges))))
        cells.clear()
        times["restored"].append(cells.do(*(KvOp("load", 0, a, b, piece=1 + n) for n, (a, b) in enumerate(ranges))))
        cells.do(*(KvOp("drop", -1, 0, 0, piece=1 + n) for n in pieces))
    print("\n| 1,024 tokens | ms |\n|---|---|")
    for name, values in times.items():
        print(f"| {name} | {1000 * statistics.median(values):.0f} |")


def conversations(model: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = random_ids(rng, CONVERSATIONS, LENGTH)
    settings = {
        "without": ("kv_cache.host_memory_mb=0",),
        "with a second tier": ("kv_cache.host_memory_mb=2048",),
    }
    print("\n| 12 conversations in turn, room for a third | mean of later visits (s) | worst (s) |\n|---|---|---|")
    expected: list[list[int]] = []
    for name, extra in settings.items():
        arguments = [word for setting in (*extra, f"kv_cache.max_items={CAPACITY}") for word in ("--set", setting)]
        with Worker(str(model), "--set", "http.request_timeout_s=600", *arguments, backend="llama_cpp") as worker:
            seconds, answers = asyncio.run(visit(worker.url, [list(prompt) for prompt in prompts]))
        expected = expected or answers
        same = sum(ours == theirs for ours, theirs in zip(answers, expected, strict=True))
        print(f"| {name} | {statistics.mean(seconds):.2f} | {max(seconds):.2f} |", flush=True)
    print(f"{same} of {len(expected)} answers are the same")


async def visit(url: str, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    seconds: list[float] = []
    answers: list[list[int]] = []
    async with httpx.AsyncClient(timeout=600) as http:
        for number in range(VISITS):
            for prompt in prompts:
                params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
                began_s = time.perf_counter()
                answer = await http.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": params})
                if number:
                    seconds.append(time.perf_counter() - began_s)
                output = answer.raise_for_status().json()["output_ids"]
                answers.append(output)
                prompt += [*output, 11, 12, 13, 14]
    return seconds, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/weft-bench-gguf"), help="where the model is kept")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = write_qwen3_06b_gguf(arguments.folder, "Q8_0")
    cells = Cells(model)
    rng = np.random.default_rng(0)
    step_times(cells, rng, arguments.rounds)
    moving(cells, rng, arguments.rounds)
    cells.backend.close()
    conversations(model)


if __name__ == "__main__":
    main()
