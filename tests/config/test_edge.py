"""configs/edge.yaml: it resolves, says what it promises, and a worker goes by it."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.launch.worker import Worker
from weft.config.resolve import resolve

EDGE = Path(__file__).parents[2] / "configs" / "edge.yaml"


def test_its_values() -> None:
    settings = resolve(file=EDGE).settings
    http, scheduler, kv = settings.http, settings.scheduler, settings.kv_cache
    assert (http.max_queue_size, http.max_concurrent_requests, http.request_timeout_s) == (256, 8, 60)
    assert (scheduler.max_batch_size, scheduler.max_input_tokens, scheduler.max_output_tokens) == (4, 128, 2048)
    assert (kv.max_items, kv.max_memory_mb) == (4194304, 1024)
    assert (kv.eviction_policy, kv.eviction_threshold, kv.cleanup_interval_s) == ("lru", 0.8, 1)


def test_a_worker_goes_by_it() -> None:
    slow = ("--set", "backend.fake.tokens_per_s=200")
    with Worker("--config", str(EDGE), *slow) as worker, httpx.Client(base_url=worker.url, timeout=60) as client:
        too_long = client.post("/v1/completions", json={"prompt": [20] * 129, "max_tokens": 1})
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
        too_much = client.post("/v1/completions", json={"prompt": [20], "max_tokens": 2049})
        assert too_much.status_code == 400
        assert worker.stats()["sequence_ids"]["total"] == 4
        body = {"prompt": [[20 + k] for k in range(20)], "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            requests = worker.stats()["requests"]
        assert (requests["queued"], requests["pending"], requests["processing"]) == (12, 4, 4)
