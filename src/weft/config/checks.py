"""Contradictions between settings that are each fine alone. `auto` contradicts nothing: the engine fits it in."""

from __future__ import annotations

from weft.config.settings import Settings
from weft.core.errors import SettingsError


def _not_above(small_key: str, small: int | str | None, large_key: str, large: int | str | None, why: str) -> None:
    """Raises SettingsError when both are numbers and the first is the larger."""
    if isinstance(small, int) and isinstance(large, int) and small > large:
        raise SettingsError(f"{small_key} {small} > {large_key} {large}: {why}", param=small_key)


def check(settings: Settings) -> None:
    """Raises SettingsError, naming both keys, when two settings cannot hold together."""
    http, scheduler, kv, model = settings.http, settings.scheduler, settings.kv_cache, settings.model
    if model.public_name in model.lora:
        raise SettingsError(
            f"model.lora {model.public_name!r}: this is the name of the model itself (model.served_name)",
            param="model.lora",
        )
    _not_above(
        "scheduler.max_batch_size",
        scheduler.max_batch_size,
        "http.max_concurrent_requests",
        http.max_concurrent_requests,
        "a batch is taken from the running set",
    )
    _not_above(
        "scheduler.chunked_prefill_size",
        scheduler.chunked_prefill_size,
        "scheduler.max_prefill_tokens",
        scheduler.max_prefill_tokens,
        "a whole chunk has to fit into one step",
    )
    _not_above("kv_cache.page_size", kv.page_size, "kv_cache.max_items", kv.max_items, "the cache has to hold a page")
    limits = (
        ("scheduler.max_input_tokens", scheduler.max_input_tokens),
        ("scheduler.max_output_tokens", scheduler.max_output_tokens),
    )
    for key, limit in limits:
        _not_above(
            key, limit, "model.max_context_tokens", model.max_context_tokens, "prompt and output share the context"
        )
        _not_above(key, limit, "kv_cache.max_items", kv.max_items, "the cache has to hold the longest request")
