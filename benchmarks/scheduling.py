"""What scheduling costs: `plan()` + `apply()` for batches of several sizes, and the order of a long queue.

    python benchmarks/scheduling.py [--cached 10000] [--steps 300]

No model runs: results are made up, so that only core, kv and scheduler are measured. Times in milliseconds; the table
is in docs/benchmarks.md. The output is checked: every row of every step has advanced by one token.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from weft.core.clock import MonotonicClock
from weft.core.plan import StepPlan, StepResult
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.limits import Limits, Policy
from weft.scheduler.scheduler import Scheduler

VOCAB = 30_000
PROMPT_TOKENS = 512
PREFIX_TOKENS = 8


def new_scheduler(cached: int, rows: int, slots: int, policy: Policy = "lpm", **limits: int) -> Scheduler:
    """A scheduler over a cache that holds so many prefixes of their own."""
    cache = PrefixCache(cached * PREFIX_TOKENS + slots, max_rows=rows, max_len=4096)
    rng = np.random.default_rng(1)
    for _ in range(cached):
        prefix = rng.integers(0, VOCAB, PREFIX_TOKENS).astype(np.int32)
        cache.tree.insert(prefix, cache.pages.allocate(PREFIX_TOKENS))
    wanted = Limits(max_concurrent_requests=rows, max_batch_size=rows, policy=policy, request_timeout_s=None, **limits)
    return Scheduler(wanted, cache, MonotonicClock(), max_context_tokens=4096, vocab_size=VOCAB)


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(np.where(plan.emits, 5, -1).astype(np.int32))


def decode_ms(rows: int, cached: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of `plan` and of `apply` for steps of so many decoding rows at 512 tokens and more of context."""
    slots = rows * (PROMPT_TOKENS + steps + 64)
    scheduler = new_scheduler(
        cached, rows, slots, max_queue_size=rows, max_prefill_tokens=2**30, chunked_prefill_size=2**30
    )
    rng = np.random.default_rng(2)
    params = SamplingParams(max_new_tokens=steps + 2, ignore_eos=True)
    requests = [scheduler.add(k, rng.integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32), params) for k in range(rows)]
    first = scheduler.plan()
    assert first is not None and first.num_rows == rows
    scheduler.apply(first, result_of(first))
    planning, recording = [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None and plan.num_rows == rows
        result = result_of(plan)
        landed = time.perf_counter()
        scheduler.apply(plan, result)
        recorded = time.perf_counter()
        scheduler.take_updates()
        planning.append((planned - start) * 1e3)
        recording.append((recorded - landed) * 1e3)
    assert all(request.output_len == steps + 1 for request in requests)
    return planning, recording


def order_ms(policy: Policy, waiting: int, cached: int, steps: int) -> list[float]:
    """Milliseconds of `plan` while so many wait, in twenty families of shared prefixes, and new ones keep coming."""
    running = 16
    scheduler = new_scheduler(cached, running, 100_000, policy, max_queue_size=waiting + running)
    rng = np.random.default_rng(3)
    families = [rng.integers(0, VOCAB, 300) for _ in range(20)]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    number, times = 0, []
    for _ in range(steps):
        while len(scheduler.queued) < waiting:
            number += 1
            own = rng.integers(0, VOCAB, int(rng.integers(5, 60)))
            prompt = np.concatenate((families[number % 20], own)).astype(np.int32)
            scheduler.add(number, prompt, params)
        start = time.perf_counter()
        plan = scheduler.plan()
        times.append((time.perf_counter() - start) * 1e3)
        assert plan is not None
        scheduler.apply(plan, result_of(plan))
        scheduler.take_updates()
    assert scheduler.meters.finished["completed"] > 0
    return times


def row(name: str, *columns: list[float]) -> str:
    cells = []
    for times in columns:
        cells.append(f"{statistics.median(times):.3f}")
        cells.append(f"{np.quantile(times, 0.99):.3f}")
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--waiting", type=int, default=2000)
    given = parser.parse_args()
    print("| running | both, median | p99 | plan, median | p99 | apply, median | p99 |\n|---|---|---|---|---|---|---|")
    for rows in (8, 64, 256, 1024):
        planning, recording = decode_ms(rows, given.cached, given.steps)
        both = [a + b for a, b in zip(planning, recording, strict=True)]
        print(row(str(rows), both, planning, recording), flush=True)
    print(f"\n| policy, {given.waiting} waiting | plan, median | p99 |\n|---|---|---|")
    policies: tuple[Policy, ...] = ("fcfs", "lpm", "dfs-weight", "lof", "random")
    for policy in policies:
        print(row(policy, order_ms(policy, given.waiting, given.cached, given.steps)), flush=True)


if __name__ == "__main__":
    main()
