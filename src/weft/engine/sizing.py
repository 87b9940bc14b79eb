"""Turns the word `auto` into numbers, once the model's geometry is known."""

from __future__ import annotations

import os

from weft.backends.base import Geometry
from weft.config.settings import Settings
from weft.core.errors import SettingsError
from weft.core.plan import PIECE_TOKENS
from weft.kv.pages import round_up
from weft.scheduler.limits import Limits

_PREFILL_TOKENS = 1024
_CHUNK_TOKENS = 512  # larger chunks are slower per token on CPU, and running streams wait for a whole chunk
_DECODE_STALL_S = 0.2
_RESIDENT_TOKENS = 1024  # 3 to 6 % of a step at 8 streams, see docs/benchmarks.md
_MEMORY_SHARE = 0.25  # of what is free when the engine starts; the rest is for activations, the page cache, others


def resolve_limits(settings: Settings, geometry: Geometry) -> Limits:
    """The scheduler's limits. Raises SettingsError for contradictions that only now come to light."""
    http, scheduler = settings.http, settings.scheduler
    running = http.max_concurrent_requests
    if running == "auto":
        running = max(geometry.running_set, scheduler.max_batch_size if scheduler.max_batch_size != "auto" else 0)
    sequences, step = geometry.num_sequences, geometry.max_step_tokens
    batch = scheduler.max_batch_size
    if batch == "auto":
        batch = running if sequences is None else min(running, sequences)
    if sequences is not None and batch > sequences:
        raise SettingsError(
            f"scheduler.max_batch_size {batch} > backend.llama_cpp.n_seq_max {sequences}: each request of a batch needs"
            " a sequence"
        )
    chunk = scheduler.chunked_prefill_size
    prefill = scheduler.max_prefill_tokens
    if step is not None:
        for key, value in (("max_prefill_tokens", prefill), ("chunked_prefill_size", chunk)):
            if isinstance(value, int) and value > step:
                raise SettingsError(
                    f"scheduler.{key} {value} > backend.llama_cpp.n_batch {step}: a step is computed at once"
                )
    if prefill == "auto":
        prefill = max(_PREFILL_TOKENS, chunk if isinstance(chunk, int) else 0)
        if step is not None and geometry.dimensions is not None:
            prefill = step
        elif step is not None:  # with the rows that decode, it still fits
            prefill = max(step - batch, chunk if isinstance(chunk, int) else 1)
    if chunk == "auto":
        chunk = min(_CHUNK_TOKENS, prefill)
    return Limits(
        max_queue_size=http.max_queue_size,
        max_concurrent_requests=running,
        max_batch_size=batch,
        max_prefill_tokens=prefill,
        chunked_prefill_size=chunk,
        mixed=scheduler.mixed,
        policy=scheduler.policy,
        priority=scheduler.priority,
        request_timeout_s=http.request_timeout_s,
        queue_timeout_s=http.queue_timeout_s,
        max_input_tokens=scheduler.max_input_tokens,
        max_output_tokens=scheduler.max_output_tokens,
        cleanup_interval_s=settings.kv_cache.cleanup_interval_s,
        session_ttl_s=settings.kv_cache.session_ttl_s,
        max_decode_stall_s=_decode_stall_s(settings, geometry),
    )


def _decode_stall_s(settings: Settings, geometry: Geometry) -> float | None:
    """How long prompts may hold up running streams in one step; `auto`: on a GPU, a chunk is short enough."""
    wanted = settings.scheduler.max_decode_stall_ms
    if wanted == "auto":
        return None if geometry.plans_ahead else _DECODE_STALL_S
    return None if wanted is None else wanted / 1000


def resolve_depth(settings: Settings, geometry: Geometry) -> int:
    """Steps that may be in flight at once: two with `scheduler.overlap`, else one."""
    overlap = settings.scheduler.overlap
    return 2 if (geometry.plans_ahead if overlap == "auto" else overlap) else 1


def resolve_context(settings: Settings, geometry: Geometry) -> int:
    """Longest sequence in tokens. Raises SettingsError when the setting asks for more than the model has."""
    wanted = settings.model.max_context_tokens
    if wanted == "auto":
        return geometry.max_context_tokens
    if wanted > geometry.max_context_tokens:
        raise SettingsError(
            f"model.max_context_tokens: {wanted} is more than the model allows ({geometry.max_context_tokens})"
        )
    return wanted


def resolve_kv_slots(settings: Settings, geometry: Geometry, limits: Limits, context: int) -> int:
    """Slots of the KV pool: the lower of `kv_cache.max_items` and `kv_cache.max_memory_mb`.

    `auto` takes a quarter of the memory that is free now, but no more than the running set can fill. An embedding model
    keeps nothing: there they are places for the tokens of the steps in flight.
    """
    kv = settings.kv_cache
    if geometry.dimensions is not None:
        step = max(round_up(context, kv.page_size), limits.max_prefill_tokens + limits.max_batch_size * kv.page_size)
        return round_up(step, kv.page_size) * resolve_depth(settings, geometry)
    budget = geometry.kv_budget_bytes
    if budget is None:
        budget = int(available_bytes() * _MEMORY_SHARE)
    useful = limits.max_concurrent_requests * round_up(context, kv.page_size)
    if kv.max_memory_mb != "auto":
        by_memory = int(kv.max_memory_mb * 2**20) // geometry.kv_bytes_per_token
    elif kv.max_items != "auto":
        by_memory = kv.max_items
    else:
        by_memory = min(useful, budget // geometry.kv_bytes_per_token)
    slots = min(by_memory, kv.max_items) if kv.max_items != "auto" else by_memory
    slots -= slots % kv.page_size
    if slots < max(2, kv.page_size):
        raise SettingsError(
            f"kv_cache.max_memory_mb {kv.max_memory_mb}, kv_cache.max_items {kv.max_items}: no room for two tokens"
            f" (one takes {geometry.kv_bytes_per_token} bytes, a page has {kv.page_size})"
        )
    return slots


def resolve_host_tokens(settings: Settings, geometry: Geometry) -> int:
    """Tokens that the second tier holds; 0: there is none. Raises SettingsError where it cannot be had."""
    kv = settings.kv_cache
    possible = geometry.piece_tokens is not None and geometry.shares_prefixes
    if kv.host_memory_mb == "auto":
        possible = possible and kv.retain == "prefix"
        return int(available_bytes() * _MEMORY_SHARE) // geometry.kv_bytes_per_token if possible else 0
    if not kv.host_memory_mb:
        return 0
    refused = f"kv_cache.host_memory_mb {kv.host_memory_mb}: "
    if not possible:
        raise SettingsError(refused + "the KV of this model and engine cannot move to host memory")
    if kv.retain == "none":
        raise SettingsError(refused + "with kv_cache.retain 'none' nothing is left to keep there")
    tokens = kv.host_memory_mb * 2**20 // geometry.kv_bytes_per_token
    if tokens < PIECE_TOKENS:
        raise SettingsError(
            refused + f"less than {PIECE_TOKENS} tokens, which is what moves at once"
            f" (one takes {geometry.kv_bytes_per_token} bytes)"
        )
    return tokens


def resolve_resident_tokens(settings: Settings) -> int:
    """Cold tokens that stay with the engine although there is a second tier."""
    wanted = settings.kv_cache.resident_tokens
    return _RESIDENT_TOKENS if wanted == "auto" else wanted


def resolve_adapters(settings: Settings, geometry: Geometry) -> int:
    """How many LoRA adapters there are. Raises SettingsError where the prefix cache has no keys for so many."""
    count, most = len(settings.model.lora), (2**31 - 1) // geometry.vocab_size - 1
    if count > most:
        raise SettingsError(
            f"model.lora: {count} adapters are too many for a vocabulary of {geometry.vocab_size} (at most {most})"
        )
    return count


def available_bytes() -> int:
    """Memory that is free now, in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: all of the memory is the best guess that the standard library offers
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
