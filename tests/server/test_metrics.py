"""/metrics and /stats: each request counts once, whoever ended it, and the numbers add up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.server.driver import Call
from tests.server.fakes import FACTS, STATES, FakeEngineClient, ended, failed, says_one_by_one, settings, silent
from weft.core.errors import EngineError
from weft.core.histogram import Histogram
from weft.server import create_app, jobs

TEXT = "/v1/completions"


async def scrape(app: FastAPI) -> dict[str, float]:
    """All samples: `name{labels}` to value, labels as in the text."""
    status, headers, body = await Call(app, "/metrics", method="GET").answer()
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


async def outcomes(app: FastAPI) -> dict[str, int]:
    """Outcomes that are not zero; /stats and /metrics agree on them."""
    samples = await scrape(app)
    shown = json.loads((await Call(app, "/stats", method="GET").answer())[2])["requests"]["finished"]
    for outcome, count in shown.items():
        assert samples[f'weft_requests_total{{outcome="{outcome}"}}'] == count
    return {outcome: count for outcome, count in shown.items() if count}


async def rejections(app: FastAPI) -> dict[str, float]:
    prefix = 'weft_rejections_total{reason="'
    found = {key.removeprefix(prefix)[:-2]: n for key, n in (await scrape(app)).items() if key.startswith(prefix)}
    return {reason: n for reason, n in found.items() if n}


# ---- each request once ------------------------------------------------------------------------------------------


async def test_every_answer_counts(app: FastAPI, engine: FakeEngineClient) -> None:
    await Call(app, TEXT, {"prompt": ["a", "b"], "n": 2}).answer()
    await Call(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}).answer()
    assert await outcomes(app) == {"completed": 5}


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("timeout", 408, None),
        ("failed", 500, None),
        ("cancelled", 499, None),
        ("rejected", 400, "invalid"),
        ("rejected", 429, "queue_full"),
        ("rejected", 503, "displaced"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_how_the_engine_ends_a_request(
    app: FastAPI, engine: FakeEngineClient, state: str, status: int, reason: str | None, stream: bool
) -> None:
    code = reason if reason == "displaced" else None
    engine.behaviour = lambda client, request: client.deliver(
        request.request_ids[0], end=failed(status, state=state, code=code)
    )
    assert (await Call(app, TEXT, {"prompt": "x", "stream": stream}).answer())[0] == status
    assert await outcomes(app) == {state: 1}
    assert await rejections(app) == ({} if reason is None else {reason: 1})


async def test_an_end_after_the_client_has_gone_does_not_count_again(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    call = Call(app, TEXT, {"prompt": "x", "n": 2})
    await engine.submitted.wait()
    engine.deliver(1, "x", end=ended())
    call.disconnect()
    await call.done()
    engine.deliver(2, "x", end=ended())
    assert await outcomes(app) == {"completed": 1, "cancelled": 1}


async def test_what_is_refused_here(app: FastAPI, engine: FakeEngineClient) -> None:
    assert (await Call(app, TEXT, {"prompt": ""}).answer())[0] == 400
    assert (await Call(app, TEXT, {"prompt": "x", "model": "other"}).answer())[0] == 404
    assert (await Call(app, "/tokenize", {"prompt": 5}).answer())[0] == 400  # no generation
    app.state.draining = True
    assert (await Call(app, TEXT, {"prompt": "x"}).answer())[0] == 503
    app.state.draining = False
    app.state.server.admission.used = 10_000
    assert (await Call(app, TEXT, {"prompt": "x", "n": 3}).answer())[0] == 429
    assert await outcomes(app) == {"rejected": 4}
    assert await rejections(app) == {"invalid": 2, "draining": 1, "queue_full": 1}


async def test_what_is_refused_by_its_headers(engine: FakeEngineClient) -> None:
    app = create_app(engine, FACTS, settings(api_keys=("secret",)))  # type: ignore[arg-type]
    key = {"Authorization": "Bearer secret"}
    assert (await Call(app, TEXT, {"prompt": "x"}).answer())[0] == 401
    assert (await Call(app, "/stats", method="GET").answer())[0] == 401  # no generation
    large = Call(app, TEXT, chunks=[], headers=key | {"Content-Length": "99999999"})
    large.disconnect()
    assert (await large.answer())[0] == 413
    measures = app.state.server.measures
    assert {reason: n for reason, n in measures.rejections.items() if n} == {"unauthorised": 1, "body_too_large": 1}
    assert measures.outcomes["rejected"] == 2


async def test_a_bug_counts_as_failed(app: FastAPI, engine: FakeEngineClient) -> None:
    def breaks(client: FakeEngineClient, request: Any) -> None:
        raise ZeroDivisionError

    engine.behaviour = breaks
    assert (await Call(app, TEXT, {"prompt": "x"}).answer())[0] == 500
    assert await outcomes(app) == {"failed": 1}


# ---- open requests ----------------------------------------------------------------------------------------------


async def test_what_the_engine_does_not_know_yet_is_queued(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = silent
    engine.engine_answers["stats"] = {
        "requests": {"queued": 1, "pending": 1, "processing": 2, "finished": {"completed": 70}},
        "engine": {"idle": True},
    }
    engine.engine_answers["metrics"] = {"gauges": {"requests": {"queued": 1, "pending": 1, "processing": 2}}}
    call = Call(app, TEXT, {"prompt": "x", "n": 6})
    await engine.submitted.wait()
    document = json.loads((await Call(app, "/stats", method="GET").answer())[2])
    assert document["requests"]["queued"] + 1 + 2 == 6
    assert not document["engine"]["idle"]
    assert (await scrape(app))['weft_requests{state="queued"}'] == 3
    call.disconnect()
    await call.done()
    document = json.loads((await Call(app, "/stats", method="GET").answer())[2])
    assert document["requests"]["queued"] == 1  # aborted, but the engine has not heard it
    assert document["engine"]["idle"]


# ---- the engine's numbers ---------------------------------------------------------------------------------------


def observed(*values: float) -> dict[str, object]:
    histogram = Histogram((0.1, 1.0))
    for value in values:
        histogram.observe(value)
    return histogram.snapshot()


ENGINE = {
    "counters": {
        "requests_total": {"completed": 7},
        "prompt_tokens_total": 11,
        "cached_tokens_total": 12,
        "generation_tokens_total": 13,
        "kv_evicted_tokens_total": 14,
        "kv_demoted_tokens_total": 17,
        "kv_restored_tokens_total": 18,
        "retractions_total": 15,
        "rejections_total": {"queue_full": 9},
        "invariant_breaches_total": 16,
    },
    "gauges": {
        "requests": STATES,
        "kv_tokens": {"free": 1, "cached": 2, "active": 3},
        "kv_host_tokens": 8,
        "sequence_ids": {"total": 4, "used": 5},
        "batch_rows": 6,
        "sessions": 7,
    },
    "histograms": {
        "queue_time": observed(0.05, 0.5, 5.0),
        "prefill_time": observed(0.05),
        "schedule_time": observed(),
        "abort_latency": observed(0.05),
        "step_time": {"extend": observed(0.5), "decode": observed(), "mixed": observed(0.5, 0.5)},
    },
}


async def test_the_engines_numbers(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.engine_answers["metrics"] = ENGINE
    samples = await scrape(app)
    for name, value in {
        "weft_prompt_tokens_total": 11,
        "weft_cached_tokens_total": 12,
        "weft_generation_tokens_total": 13,
        "weft_kv_evicted_tokens_total": 14,
        "weft_kv_demoted_tokens_total": 17,
        "weft_kv_restored_tokens_total": 18,
        "weft_kv_host_tokens": 8,
        "weft_retractions_total": 15,
        "weft_invariant_breaches_total": 16,
        'weft_kv_tokens{state="cached"}': 2,
        'weft_sequence_ids{state="used"}': 5,
        "weft_batch_rows": 6,
        "weft_sessions": 7,
        "weft_engine_up": 1,
        'weft_queue_time_seconds_bucket{le="0.1"}': 1,
        'weft_queue_time_seconds_bucket{le="1"}': 2,
        'weft_queue_time_seconds_bucket{le="+Inf"}': 3,
        "weft_queue_time_seconds_count": 3,
        "weft_queue_time_seconds_sum": 5.55,
        'weft_step_time_seconds_count{mode="mixed"}': 2,
        "weft_abort_latency_seconds_count": 1,
        "weft_schedule_time_seconds_count": 0,
        "weft_prefill_time_seconds_count": 1,
        'weft_requests_total{outcome="completed"}': 0,  # what clients see is counted here, not there
        'weft_rejections_total{reason="queue_full"}': 0,
    }.items():
        assert samples[name] == pytest.approx(value), name


async def test_an_engine_that_does_not_answer(
    app: FastAPI, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.failure = EngineError("it crashed")
    samples = await scrape(app)
    assert samples["weft_engine_up"] == 0
    assert "weft_batch_rows" not in samples  # it was never heard
    engine.failure = None
    engine.engine_answers["metrics"] = ENGINE
    assert (await scrape(app))["weft_engine_up"] == 1
    monkeypatch.setattr("weft.server.metrics.QUERY_LIMIT_S", 0.0)
    engine.engine_answers["metrics"] = None
    samples = await scrape(app)
    assert (samples["weft_engine_up"], samples["weft_batch_rows"]) == (0, 6)


# ---- times ------------------------------------------------------------------------------------------------------


async def test_times_of_a_stream(app: FastAPI, engine: FakeEngineClient) -> None:
    engine.behaviour = says_one_by_one("a", "b", "c", "d")
    await Call(app, TEXT, {"prompt": "x", "stream": True}).answer()
    samples = await scrape(app)
    assert samples["weft_time_to_first_token_seconds_count"] == 1
    assert samples["weft_inter_token_latency_seconds_count"] == 3
    assert samples["weft_e2e_request_latency_seconds_count"] == 1


async def test_tokens_that_come_together_share_their_time(
    app: FastAPI, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    engine.behaviour = silent
    call = Call(app, TEXT, {"prompt": "x", "stream": True})
    await engine.submitted.wait()
    now[0] += 0.7
    engine.deliver(1, "a", token_ids=[1])
    await call.next()
    await call.next_data()
    now[0] += 2.0
    engine.deliver(1, "bcde", token_ids=[1, 2, 3, 4], end=ended())
    await call.next_data()
    await call.done()
    await asyncio.sleep(0)
    monkeypatch.undo()
    samples = await scrape(app)
    assert samples["weft_time_to_first_token_seconds_sum"] == pytest.approx(0.7)
    assert samples['weft_inter_token_latency_seconds_bucket{le="0.25"}'] == 0
    assert samples['weft_inter_token_latency_seconds_bucket{le="0.5"}'] == 4
    assert samples["weft_inter_token_latency_seconds_sum"] == pytest.approx(2.0)
    assert samples["weft_e2e_request_latency_seconds_sum"] == pytest.approx(2.7)


async def test_whole_answers_have_no_token_times(app: FastAPI, http: httpx.AsyncClient) -> None:
    await http.post(TEXT, json={"prompt": "x"})
    samples = await scrape(app)
    assert samples["weft_time_to_first_token_seconds_count"] == 0
    assert samples["weft_e2e_request_latency_seconds_count"] == 1
