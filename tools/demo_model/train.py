"""Train the demonstration model in fixed stages that are counted in tokens.

Every batch is made from the seed and its number, so a run that was stopped goes on where its last checkpoint was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .data import Batch, Encoder, make_batch
from .generate import LOOSE, POLISH
from .model import DemoModel, save_model
from .optimizer import Optimizer
from .tokenizer import save_tokenizer, train_tokenizer

SEED = 7
TOKENS_PER_STEP = 4096
TOTAL_TOKENS = 17_000_000  # of the main run; the polish comes on top
WARM_UP = 100
# Shares of the main run: the rate falls from here, looser talk joins, the rows of the last stage begin.
DECAY_FROM, LOOSE_TALK_FROM, LAST_STAGE_FROM = 0.55, 0.6, 0.84
POLISH_TOKENS, POLISH_RATE = 5_000_000, 0.45


@dataclass(frozen=True)
class Stage:
    """Which rows are drawn until a number of tokens, and how many of the 128-rows are only sums."""

    until: float
    rows: dict[int, float]
    sums: float


# Counted in tokens, not in shares: a run may be shortened or lengthened as long as its rate has not begun to fall.
STAGES = (
    Stage(1.9e6, {128: 60, 256: 40}, 0.05),
    Stage(3.6e6, {128: 34, 256: 32, 512: 20, 1024: 14}, 0.2),
    Stage(4.01e6, {128: 25, 256: 27, 512: 24, 1024: 24}, 0.4),
    Stage(float("inf"), {128: 30, 256: 30, 512: 24, 1024: 16}, 0.4),
)
LAST_STAGE = Stage(float("inf"), {128: 19, 256: 23, 512: 25, 1024: 27, 2048: 6}, 0.3)
POLISH_STAGE = Stage(float("inf"), {128: 30, 256: 32, 512: 22, 1024: 16}, 0.1)

_encoder: Encoder | None = None


def plan(seed: int, step: int, steps: int) -> tuple[int, bool, int]:
    """Row length of a step, whether it is only sums, and which looser talk is in it."""
    stage = next(s for s in STAGES if step * TOKENS_PER_STEP < s.until)
    if step > steps * LAST_STAGE_FROM:
        stage = LAST_STAGE
    late = LOOSE if step > steps * LOOSE_TALK_FROM else 0
    if step >= steps:
        stage, late = POLISH_STAGE, POLISH
    rng = random.Random(f"plan {seed} {step}")
    row = rng.choices(list(stage.rows), weights=list(stage.rows.values()))[0]
    return row, row == 128 and rng.random() < stage.sums, late


def rate(step: int, steps: int) -> float:
    """Warm up, stay, then fall in a straight line; the polish starts lower and falls again."""
    if step >= steps:
        return max(POLISH_RATE * (1 - (step - steps) / (POLISH_TOKENS // TOKENS_PER_STEP)), 0.005)
    left = (steps - step) / (steps * (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP, max(left, 0.01))


def _start_worker(tokenizer: str) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(Tokenizer.from_str(tokenizer))


def _work(seed: int, step: int, row: int, sums: bool, late: int) -> Batch:
    assert _encoder is not None
    return make_batch(_encoder, seed, step, row, TOKENS_PER_STEP, sums, late)


def batches(tokenizer: Tokenizer, seed: int, first: int, steps: int, end: int, ahead: int = 12) -> Iterator[Batch]:
    """Batches in order, made by one worker process ahead of time."""
    with ProcessPoolExecutor(1, get_context("spawn"), _start_worker, (tokenizer.to_str(),)) as pool:
        waiting: list[Future[Batch]] = []
        for step in range(first, end + ahead):
            if step < end:
                waiting.append(pool.submit(_work, seed, step, *plan(seed, step, steps)))
            if len(waiting) > ahead or (step >= end and waiting):
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def save_checkpoint(model: DemoModel, optimizer: Optimizer, tokenizer: Tokenizer, step: int, folder: Path) -> None:
    """The model for readers, and beside it the float32 state for going on."""
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)
    temporary = folder.parent / "state.tmp"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state()}, temporary)
    os.replace(temporary, folder.parent / "state.pt")


def train(out: Path, seed: int, tokens: int, threads: int, resume: bool, save_every: int, stop_after: int = 0) -> Path:
    """Run all stages; returns the folder of the finished model."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    with contextlib.suppress(OSError):
        os.nice(max(0, 10 - os.nice(0)))
    torch._dynamo.config.recompile_limit = 16  # one compilation for each row length
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(seed)
    save_tokenizer(tokenizer, out / "tokenizer")
    model = DemoModel(seed=seed)
    optimizer = Optimizer(model)
    steps, first = tokens // TOKENS_PER_STEP, 0
    end = steps + POLISH_TOKENS // TOKENS_PER_STEP
    if resume and (out / "state.pt").exists():
        state = torch.load(out / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load(state["optimizer"])
        first = state["step"]
    for block in model.blocks:
        block.compile(dynamic=False)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, steps {first} to {end}", flush=True)
    began, loss_sum, shown, last_saved = time.time(), 0.0, 0, first
    for step, batch in enumerate(batches(tokenizer, seed, first, steps, end), first):
        ids = torch.from_numpy(batch.ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.from_numpy(batch.chosen))
        loss.backward()
        norm = optimizer.step(rate(step, steps))
        loss_sum, shown = loss_sum + float(loss.detach()), shown + 1
        if (step + 1) % 20 == 0 or step + 1 == end:
            spent = time.time() - began
            speed = (step + 1 - first) * TOKENS_PER_STEP / spent
            done = (step + 1) * TOKENS_PER_STEP / 1e6
            print(
                f"{done:.2f}M loss {loss_sum / shown:.3f} grad {norm:.2f} row {batch.row} {speed:.0f}/s {spent:.0f}s",
                flush=True,
            )
            loss_sum, shown = 0.0, 0
        if (step + 1 - last_saved) * TOKENS_PER_STEP >= save_every:
            last_saved = step + 1
            save_checkpoint(
                model, optimizer, tokenizer, step + 1, out / f"at-{(step + 1) * TOKENS_PER_STEP / 1e6:.1f}M"
            )
        if stop_after and step + 1 - first >= stop_after:
            end = step + 1
            break
    save_checkpoint(model, optimizer, tokenizer, end, out / "final")
    return out / "final"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo_model"))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--tokens", type=int, default=TOTAL_TOKENS, help="without the polish")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-every", type=int, default=1_000_000, help="tokens between checkpoints")
    parser.add_argument("--stop-after", type=int, default=0, help="stop early after this many steps (to measure speed)")
    args = parser.parse_args()
    train(args.out, args.seed, args.tokens, args.threads, args.resume, args.save_every, args.stop_after)


if __name__ == "__main__":
    main()
