"""The system that is simulated: from settings, as `weft serve` would resolve them, or drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import msgspec

from weft import __version__
from weft.backends.base import Geometry
from weft.config.settings import Settings
from weft.core.errors import SettingsError
from weft.engine.sizing import resolve_context, resolve_depth, resolve_kv_slots, resolve_limits
from weft.engine.trace import CacheShape, Header, ModelFacts
from weft.scheduler.limits import Limits
from weft.scheduler.reserve import FLOOR, START
from weft.sim.options import Workload

END_TOKENS = 64
GEOMETRY = Geometry(
    num_layers=32,
    kv_bytes_per_token=131072,
    max_context_tokens=1024,
    vocab_size=4096,
    eos_token_ids=tuple(range(END_TOKENS)),  # many, so that answers without `max_tokens` end after some 64 tokens
    description="simulated",
    kv_budget_bytes=2**30,
)

_SETTINGS = (
    "scheduler.",
    "kv_cache.",
    "model.max_context_tokens",
    "http.max_queue_size",
    "http.max_concurrent_requests",
    "http.request_timeout_s",
    "http.queue_timeout_s",
)


@dataclass(frozen=True, slots=True)
class System:
    """What runs. `tick_s`: how often deadlines are looked at."""

    header: Header
    tick_s: float = 1.0


def refuse_idle_settings(sets: list[str]) -> None:
    """Raises SettingsError for a `--set` that would change nothing here."""
    for item in sets:
        key = item.partition("=")[0].strip()
        if not key.startswith(_SETTINGS):
            names = ", ".join(name.rstrip(".") for name in _SETTINGS)
            raise SettingsError(f"--set {key}: it means nothing to a simulation (allowed: {names})")


def system_from(settings: Settings) -> System:
    """Resolves `auto` for the simulated model. Raises SettingsError."""
    limits = resolve_limits(settings, GEOMETRY)
    context = resolve_context(settings, GEOMETRY)
    slots = resolve_kv_slots(settings, GEOMETRY, limits, context)
    kv = settings.kv_cache
    header = Header(
        weft=__version__,
        note="simulated",
        depth=resolve_depth(settings, GEOMETRY),
        limits=limits,
        cache=CacheShape(
            capacity=slots,
            page_size=kv.page_size,
            max_rows=limits.max_batch_size,
            max_len=min(context, slots),
            retain=kv.retain,
            eviction_policy=kv.eviction_policy,
            eviction_threshold=kv.eviction_threshold,
            bytes_per_token=GEOMETRY.kv_bytes_per_token,
        ),
        model=ModelFacts(
            max_context_tokens=context,
            vocab_size=GEOMETRY.vocab_size,
            eos_token_ids=GEOMETRY.eos_token_ids,
            seed=settings.scheduler.seed,
        ),
    )
    return System(header, min(settings.scheduler.deadline_scan_s, kv.cleanup_interval_s))


def varied(system: System, seed: int) -> System:
    """Limits, sizes and policies drawn from a seed; small, so that everything is short of everything."""
    rng = Random(f"system {seed}")
    page_size = rng.choice([1, 1, 1, 2, 16, 64])
    running = rng.choice([1, 4, 8, 16, 32])
    batch = rng.randint((running + 1) // 2, running)
    context = rng.choice([100, 200, 400, 800])
    limits = Limits(
        max_queue_size=rng.choice([1, 4, 16, 64]),
        max_concurrent_requests=running,
        max_batch_size=batch,
        max_prefill_tokens=rng.choice([32, 64, 256, 1024]),
        chunked_prefill_size=rng.choice([None, 8, 32, 128]),
        mixed=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "lpm", "dfs-weight", "lof", "random"]),  # type: ignore[arg-type]
        priority=rng.random() < 0.5,
        request_timeout_s=rng.choice([None, 3.0, 30.0]),
        queue_timeout_s=rng.choice([None, None, 2.0]),
        max_output_tokens=rng.choice([None, None, 100]),
        cleanup_interval_s=1.0,
        session_ttl_s=rng.choice([2.0, 30.0, 600.0]),
    )
    chunk = limits.chunked_prefill_size
    if chunk is not None and chunk > limits.max_prefill_tokens:
        limits = replace(limits, chunked_prefill_size=limits.max_prefill_tokens)
    # From less than one longest request to room for everybody.
    capacity = int(context * max(rng.choice([0.8, 1.5]), batch * rng.choice([0.0, 0.1, 0.2, 0.5, 1.0])))
    capacity = max(2 * page_size, capacity)
    capacity -= capacity % page_size
    cache = msgspec.structs.replace(
        system.header.cache,
        capacity=capacity,
        page_size=page_size,
        max_rows=batch,
        max_len=min(context, capacity),
        retain=rng.choice(["prefix", "prefix", "prefix", "none"]),
        eviction_policy=rng.choice(["lru", "lfu", "fifo"]),
        eviction_threshold=rng.choice([0.5, 0.8, 1.0]),
    )
    cache = _with_sequences(cache, seed)
    model = msgspec.structs.replace(
        system.header.model,
        max_context_tokens=context,
        seed=rng.randrange(2**32),
        adapters=Random(f"adapters {seed}").choice([0, 0, 1, 2]),  # its own draw: the seeds stay what they were
    )
    header = msgspec.structs.replace(
        system.header,
        depth=rng.randint(1, 2),
        new_token_ratio=rng.choice([START, FLOOR]),
        limits=limits,
        cache=cache,
        model=model,
    )
    return System(header, rng.choice([0.5, 1.0]))


def _with_sequences(cache: CacheShape, seed: int) -> CacheShape:
    """Half of the systems with pages of one token store KV under sequence ids; of those some have a second tier, some
    whole states."""
    rng = Random(f"sequences {seed}")  # its own draw: the seeds stay what they were
    if cache.page_size != 1 or rng.random() < 0.5:
        return cache
    kind = rng.choice(["plain", "tier", "tier", "whole"])
    return msgspec.structs.replace(
        cache,
        num_sequences=rng.randint(1, cache.max_rows + 8),
        shares=kind != "whole",
        host_tokens=rng.randint(1, 2 * cache.capacity) if kind == "tier" else 0,
        resident_tokens=rng.randint(0, cache.capacity),
        piece_tokens=rng.choice([8, 64, 256]),
    )


def varied_workload(workload: Workload, seed: int) -> Workload:
    """The same kind of clients, with longer or shorter answers, hurries and bursts."""
    rng = Random(f"workload {seed}")
    return replace(
        workload,
        load=workload.load * rng.choice([0.5, 2.0, 20.0]),
        arrivals=rng.choice(["poisson", "bursty"]),  # type: ignore[arg-type]
        families=rng.choice([1, 4, 12]),
        turns=rng.choice([1.0, 2.0, 4.0]),
        think_s=rng.choice([0.01, 1.0]),
        output_tokens=workload.output_tokens * rng.choice([1, 1, 4, 20]),
        output_spread=rng.choice([0.3, 1.0]),
        open_ended=rng.choice([0.0, 0.05, 0.5]),
    )


def shrunk(system: System, share: float) -> System:
    """The system with a share of its KV cache, but at least 64 tokens and two pages.

    It reserves as little for running requests as after a long time without trouble, so that it has to retract.
    """
    shape = system.header.cache
    capacity = max(int(shape.capacity * share), 2 * shape.page_size, 64)
    capacity = min(shape.capacity, capacity - capacity % shape.page_size)
    shape = msgspec.structs.replace(shape, capacity=capacity, max_len=min(shape.max_len, capacity))
    return System(msgspec.structs.replace(system.header, cache=shape, new_token_ratio=FLOOR), system.tick_s)
