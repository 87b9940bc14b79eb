"""What `auto` becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.conftest import fake_settings
from weft.backends.base import Geometry
from weft.config.resolve import resolve
from weft.core.errors import SettingsError
from weft.engine import sizing
from weft.scheduler.limits import Limits

GEOMETRY = Geometry(2, 1024, 4096, 32000, (), "a test's model")


def limits(*sets: str) -> Limits:
    return sizing.resolve_limits(fake_settings(*sets), GEOMETRY)


def slots(*sets: str, geometry: Geometry = GEOMETRY) -> int:
    settings = resolve(sets=["backend.name=fake", *sets]).settings
    context = sizing.resolve_context(settings, geometry)
    return sizing.resolve_kv_slots(settings, geometry, sizing.resolve_limits(settings, geometry), context)


@pytest.mark.parametrize(
    ("sets", "running", "batch"),
    [
        ((), 64, 64),
        (("http.max_concurrent_requests=8",), 8, 8),
        (("scheduler.max_batch_size=4",), 64, 4),
        (("scheduler.max_batch_size=200",), 200, 200),
        (("http.max_concurrent_requests=8", "scheduler.max_batch_size=4"), 8, 4),
    ],
)
def test_running_set_and_batch(sets: tuple[str, ...], running: int, batch: int) -> None:
    resolved = limits(*sets)
    assert (resolved.max_concurrent_requests, resolved.max_batch_size) == (running, batch)


@pytest.mark.parametrize(
    ("sets", "prefill", "chunk"),
    [
        ((), 1024, 512),
        (("scheduler.chunked_prefill_size=4096",), 4096, 4096),
        (("scheduler.max_prefill_tokens=100",), 100, 100),
        (("scheduler.chunked_prefill_size=null",), 1024, None),
    ],
)
def test_prefill_and_chunk(sets: tuple[str, ...], prefill: int, chunk: int | None) -> None:
    resolved = limits(*sets)
    assert (resolved.max_prefill_tokens, resolved.chunked_prefill_size) == (prefill, chunk)


def test_other_limits_pass_through() -> None:
    resolved = limits("http.max_queue_size=3", "http.queue_timeout_s=2", "scheduler.priority=true")
    assert (resolved.max_queue_size, resolved.queue_timeout_s, resolved.priority) == (3, 2.0, True)


def test_context() -> None:
    assert sizing.resolve_context(fake_settings(), GEOMETRY) == 4096
    assert sizing.resolve_context(fake_settings("model.max_context_tokens=100"), GEOMETRY) == 100
    with pytest.raises(SettingsError) as caught:
        sizing.resolve_context(fake_settings("model.max_context_tokens=4097"), GEOMETRY)
    assert "4097" in caught.value.message and "4096" in caught.value.message


def test_the_lower_limit_counts() -> None:
    assert slots("kv_cache.max_items=500") == 500
    assert slots("kv_cache.max_memory_mb=1") == 1024
    assert slots("kv_cache.max_memory_mb=1", "kv_cache.max_items=500") == 500
    assert slots("kv_cache.max_memory_mb=1", "kv_cache.max_items=5000") == 1024


def test_whole_pages() -> None:
    assert slots("kv_cache.max_items=500", "kv_cache.page_size=64") == 448


def test_auto_takes_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_bytes", lambda: 4 * 1024 * 1000)
    assert slots() == 1000
    monkeypatch.setattr(sizing, "available_bytes", lambda: 2**50)
    assert slots("http.max_concurrent_requests=2") == 2 * 4096  # no more than can be filled


def test_auto_leaves_room_for_the_last_page_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_bytes", lambda: 2**50)
    geometry = replace(GEOMETRY, max_context_tokens=300)
    assert slots("http.max_concurrent_requests=1", "kv_cache.page_size=256", geometry=geometry) == 512


def test_no_room_at_all() -> None:
    with pytest.raises(SettingsError) as caught:
        slots("kv_cache.max_memory_mb=1", geometry=replace(GEOMETRY, kv_bytes_per_token=2**20))
    assert "kv_cache.max_memory_mb" in caught.value.message


def test_memory_is_read_from_the_system() -> None:
    assert sizing.available_bytes() > 2**20


def test_the_device_may_bring_its_own_running_set_and_budget() -> None:
    device = replace(GEOMETRY, running_set=256, kv_budget_bytes=1024 * 5000)
    assert sizing.resolve_limits(fake_settings(), device).max_concurrent_requests == 256
    assert slots(geometry=device) == 5000


TIERED = replace(GEOMETRY, piece_tokens=256)


def host_tokens(*sets: str, geometry: Geometry = TIERED) -> int:
    return sizing.resolve_host_tokens(fake_settings(*sets), geometry)


def test_the_second_tier() -> None:
    assert host_tokens("kv_cache.host_memory_mb=0") == 0
    assert host_tokens("kv_cache.host_memory_mb=64") == 64 * 1024
    with pytest.raises(SettingsError, match="host_memory_mb 64: with kv_cache.retain 'none'"):
        host_tokens("kv_cache.host_memory_mb=64", "kv_cache.retain=none")
    large = replace(TIERED, kv_bytes_per_token=2**20)
    with pytest.raises(SettingsError, match="host_memory_mb 200: less than 256 tokens"):
        host_tokens("kv_cache.host_memory_mb=200", geometry=large)
    for geometry in (GEOMETRY, replace(TIERED, shares_prefixes=False)):
        with pytest.raises(SettingsError, match="host_memory_mb 64: the KV of this model and engine cannot move"):
            host_tokens("kv_cache.host_memory_mb=64", geometry=geometry)


def test_the_second_tier_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_bytes", lambda: 400 * 2**20)
    assert host_tokens() == 100 * 1024
    assert host_tokens("kv_cache.retain=none") == 0
    for geometry in (GEOMETRY, replace(TIERED, shares_prefixes=False)):
        assert host_tokens(geometry=geometry) == 0


def test_cold_tokens_that_stay() -> None:
    assert sizing.resolve_resident_tokens(fake_settings()) == 1024
    assert sizing.resolve_resident_tokens(fake_settings("kv_cache.resident_tokens=0")) == 0


def test_an_embedding_model_has_places_for_its_steps() -> None:
    geometry = replace(GEOMETRY, kv_bytes_per_token=0, dimensions=8, max_step_tokens=512, max_context_tokens=8192)
    assert slots(geometry=geometry) == 8192
    assert slots("kv_cache.max_memory_mb=1", "kv_cache.max_items=100", geometry=geometry) == 8192
    short = replace(geometry, max_context_tokens=256)
    assert slots("scheduler.overlap=true", geometry=short) == 2 * (512 + 64)
    assert slots("kv_cache.page_size=16", geometry=short) == 512 + 64 * 16
    resolved = sizing.resolve_limits(fake_settings(), geometry)
    assert resolved.max_prefill_tokens == 512
