"""The walk of tests/property with short words for what scheduler tests do again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.property.walk import VOCAB, Shape, Walk
from weft.core.plan import StepPlan
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.scheduler.limits import Limits

ROOMY = Limits(max_queue_size=1000, max_concurrent_requests=64, max_batch_size=64, request_timeout_s=None)


def new_walk(
    *,
    capacity: int = 4096,
    page_size: int = 1,
    max_context: int = 1024,
    retain: str = "prefix",
    depth: int = 1,
    ratio: float = 0.7,
    num_sequences: int | None = None,
    shares: bool = True,
    host_tokens: int = 0,
    resident_tokens: int = 1_000_000,
    piece_tokens: int = 256,
    adapters: int = 0,
    **limits: Any,
) -> Walk:
    """A system with room for everything that `limits` does not forbid; each of its steps is checked."""
    shape = Shape(capacity, page_size, max_context, retain, replace(ROOMY, **limits), depth, ratio)
    shape.num_sequences, shape.shares = num_sequences, shares
    shape.host_tokens, shape.resident_tokens, shape.piece_tokens = host_tokens, resident_tokens, piece_tokens
    shape.adapters = adapters
    return Walk(shape)


def tokens(length: int, *, start: int = 1) -> np.ndarray:
    """A prompt of its own for each `start` from 1 to 49."""
    rng = np.random.default_rng(start)
    rest = rng.integers(1, VOCAB, size=length - 1)
    return np.concatenate([[start], rest]).astype(np.int32)


def add(walk: Walk, prompt: np.ndarray | Sequence[int], *, new: int | None = 4, **more: Any) -> Request:
    """Adds a greedy request that no end token ends; parameters of sampling and of `Walk.add` alike."""
    outer = {name: more.pop(name) for name in ("priority", "timeout_s", "session", "adapter") if name in more}
    params = SamplingParams(**({"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True} | more))
    walk.add(np.asarray(prompt), params, **outer)
    return walk.requests[len(walk.requests)]


def step(walk: Walk, *, broken: bool = False) -> StepPlan:
    """One whole step; there must be one."""
    plan = walk.begin_step()
    assert plan is not None
    walk.end_step(plan, broken=broken)
    return plan


def ids(plan: StepPlan) -> list[int]:
    return [int(i) for i in plan.request_ids]


def shares(plan: StepPlan) -> dict[int, int]:
    """Request id -> new tokens in this step."""
    return dict(zip(ids(plan), plan.extend_lens.tolist(), strict=True))


def steps_until_done(walk: Walk) -> list[StepPlan]:
    plans = []
    while walk.scheduler.has_work:
        plans.append(step(walk))
        assert len(plans) < 5000
    return plans
