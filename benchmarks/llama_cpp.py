"""GGUF models: Weft beside llama-server over HTTP and llama-batched-bench without a server, same files, same run.

    python benchmarks/llama_cpp.py --binaries /path/to/llama.cpp/bin --kind Q8_0

`--binaries` has llama-server and llama-batched-bench, built from the sources in llama-cpp-python's source package with
the same flags as the library. Model: random weights in Qwen3-0.6B's shape (benchmarks/shapes.py).

Decode: N streams at once, 32 random tokens in, greedy, nothing shared; tokens per second of the 64 tokens after the
first, from the difference between asking for 65 and for 1. Prompts do not wait for streams here, as in llama-server
(`scheduler.max_decode_stall_ms` null), so that all streams run together. llama-batched-bench (unified KV) does the same
without HTTP, sampling or text. Shared prefix: 16 clients with 1,024 common tokens and 16 of their own, 8 tokens out,
then three more turns of 16 tokens in and 8 out. Rounds alternate between the servers; medians. Every answer must have
all its tokens, and the servers' greedy answers to one prompt are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.pop(0)  # this folder: llama_cpp.py would hide the package
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.shapes import write_qwen3_06b_gguf
from tests.launch.worker import Worker

STREAMS = (1, 8, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
CLIENTS, SHARED_TOKENS, OWN_TOKENS, TURN_TOKENS, TURNS = 16, 1024, 16, 8, 4
SLOTS, CONTEXT_TOKENS = 32, 24576


def random_ids(rng: np.random.Generator, *shape: int) -> list:
    return rng.integers(10, 4000, size=shape).tolist()


class Weft:
    def __init__(self, model: Path) -> None:
        settings = (
            f"http.max_concurrent_requests={SLOTS}",
            f"kv_cache.max_items={CONTEXT_TOKENS}",
            "scheduler.max_decode_stall_ms=null",
        )
        arguments = [word for setting in settings for word in ("--set", setting)]
        self._worker = Worker(str(model), "--set", "http.request_timeout_s=600", *arguments, backend="llama_cpp")
        self._worker.__enter__()
        self.url = self._worker.url

    def flush(self) -> None:
        httpx.post(f"{self.url}/flush_cache").raise_for_status()

    async def complete(self, http: httpx.AsyncClient, ids: list[int], tokens: int) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = await http.post(f"{self.url}/generate", json={"input_ids": ids, "sampling_params": params})
        output: list[int] = answer.raise_for_status().json()["output_ids"]
        return output

    def close(self) -> None:
        self._worker.__exit__(None, None, None)


class LlamaServer:
    def __init__(self, model: Path, binaries: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [str(binaries / "llama-server"), "-m", str(model), "--port", str(port), "-np", str(SLOTS), "-kvu"]
        command += ["-c", str(CONTEXT_TOKENS), "-t", str(os.cpu_count()), "-tb", str(os.cpu_count()), "-cb"]
        command += ["--slot-save-path", tempfile.gettempdir()]  # without it, slots cannot be erased
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        end_s = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < end_s and self._process.poll() is None, "llama-server did not start"
            time.sleep(0.2)

    def flush(self) -> None:
        for slot in range(SLOTS):
            httpx.post(f"{self.url}/slots/{slot}?action=erase").raise_for_status()

    async def complete(self, http: httpx.AsyncClient, ids: list[int], tokens: int) -> list[int]:
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        answer = await http.post(f"{self.url}/completion", json=body | {"return_tokens": True})
        output: list[int] = answer.raise_for_status().json()["tokens"]
        return output

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


Server = Weft | LlamaServer


async def all_at_once(server: Server, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the answers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=1200, limits=limits) as http:
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(server.complete(http, ids, tokens) for ids in prompts))
        seconds = time.perf_counter() - start_s
    assert all(len(answer) == tokens for answer in answers), [len(answer) for answer in answers]
    return seconds, list(answers)


def batched_bench(model: Path, binaries: Path) -> dict[int, float]:
    """Tokens per second of decoding, by number of streams."""
    command = [str(binaries / "llama-batched-bench"), "-m", str(model), "-c", str(CONTEXT_TOKENS), "-kvu"]
    command += ["-npp", str(PROMPT_TOKENS), "-ntg", str(OUTPUT_TOKENS), "-npl", ",".join(map(str, STREAMS))]
    command += ["-t", str(os.cpu_count()), "-tb", str(os.cpu_count()), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["pl"]: row["speed_tg"] for row in rows}


def decode(servers: dict[str, Server], model: Path, binaries: Path, rounds: int) -> None:
    print("| streams | " + " | ".join(servers) + " | batched-bench | Weft / server | Weft / batched-bench |")
    print("|---" * (len(servers) + 4) + "|")
    rates: dict[tuple[str, int], list[float]] = {}
    for server in servers.values():  # warms up
        asyncio.run(all_at_once(server, random_ids(np.random.default_rng(7), 8, PROMPT_TOKENS), 8))
    for number in range(rounds):
        for streams in STREAMS:
            rng = np.random.default_rng(1000 * number + streams)
            few, many = (random_ids(rng, streams, PROMPT_TOKENS) for _ in range(2))  # nothing of one is cached for two
            for name, server in servers.items():
                seconds = 0.0
                for prompts, tokens, sign in ((few, 1, -1), (many, OUTPUT_TOKENS + 1, 1)):
                    server.flush()
                    seconds += sign * asyncio.run(all_at_once(server, prompts, tokens))[0]
                rates.setdefault((name, streams), []).append(streams * OUTPUT_TOKENS / seconds)
        for streams, rate in batched_bench(model, binaries).items():
            rates.setdefault(("bench", streams), []).append(rate)
    for streams in STREAMS:
        weft, peer, bench = (statistics.median(rates[name, streams]) for name in (*servers, "bench"))
        ratios = f"{weft / peer:.2f} | {weft / bench:.2f}"
        print(f"| {streams} | {weft:.0f} | {peer:.0f} | {bench:.0f} | {ratios} |", flush=True)


def shared(servers: dict[str, Server], rounds: int) -> None:
    print("| turn | " + " | ".join(f"{name}, s" for name in servers) + " | ratio |")
    print("|---" * (len(servers) + 2) + "|")
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for name, server in servers.items():
            rng = np.random.default_rng(number)
            common = random_ids(rng, SHARED_TOKENS)
            server.flush()
            chats = [common + own for own in random_ids(rng, CLIENTS, OWN_TOKENS)]
            for turn in range(TURNS):
                seconds, answers = asyncio.run(all_at_once(server, chats, TURN_TOKENS))
                times.setdefault((name, turn), []).append(seconds)
                more = random_ids(rng, CLIENTS, OWN_TOKENS)
                chats = [chat + answer + own for chat, answer, own in zip(chats, answers, more, strict=True)]
    weft, peer = servers
    for turn in range(TURNS):
        ours, theirs = (statistics.median(times[name, turn]) for name in (weft, peer))
        print(f"| {turn + 1} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} |", flush=True)
    ours, theirs = (sum(statistics.median(times[name, turn]) for turn in range(TURNS)) for name in (weft, peer))
    print(f"| all | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/weft-bench-gguf"), help="for the model")
    parser.add_argument("--kind", choices=["Q8_0", "Q4_K_M"], default="Q8_0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["decode", "shared"])
    options = parser.parse_args()
    model = write_qwen3_06b_gguf(options.folder, options.kind)
    servers: dict[str, Server] = {"Weft": Weft(model), "llama-server": LlamaServer(model, options.binaries)}
    try:
        if options.only != "shared":
            decode(servers, model, options.binaries, options.rounds)
        if options.only != "decode":
            shared(servers, options.rounds)
        for server in servers.values():
            server.flush()
        prompt = [random_ids(np.random.default_rng(99), PROMPT_TOKENS)]
        (ours,), (theirs,) = (asyncio.run(all_at_once(s, prompt, OUTPUT_TOKENS))[1] for s in servers.values())
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), OUTPUT_TOKENS)
        print(f"greedy answers agree for {same} of {OUTPUT_TOKENS} tokens")
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    main()
