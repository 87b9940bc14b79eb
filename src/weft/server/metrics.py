"""GET /metrics: everything for Prometheus, in its text format.

Numbers come from two places. The engine tells what only it can see; this process counts what clients see (`Measures`),
and only it sees every request: also those that were refused before the engine heard of them. While the engine does not
answer, its last numbers are served again, with `weft_engine_up` 0.

The text format, not OpenMetrics: there the gauge `weft_requests` and the counter `weft_requests_total` share a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from fastapi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from weft.core.errors import WeftError
from weft.server.jobs import QUERY_LIMIT_S, Server
from weft.server.speech import Desk

# name: (label, help)
GAUGES = {
    "requests": ("state", "Open requests by state; queued ones include those that are being tokenized."),
    "kv_tokens": ("state", "Tokens of KV: free, cached (nobody needs it now), or active (held by a running request)."),
    "kv_host_tokens": (None, "Tokens of KV in the second tier, the host's memory."),
    "sequence_ids": ("state", "Places in a batch: in all, and used."),
    "batch_rows": (None, "Requests in the batch."),
    "sessions": (None, "Sessions whose KV is kept."),
    "speech_utterances": ("state", "Texts that are being spoken; the only state is open."),
    "conversations": (None, "Conversations of streaming sessions."),
    "engine_up": (None, "1 if the engine has answered just now; if 0, all that it measures is as it last said."),
}
COUNTERS = {
    "requests": ("outcome", "Requests that have ended; each answer counts, a request refused on arrival counts once."),
    "prompt_tokens": (None, "Tokens of prompts that were admitted to a batch."),
    "cached_tokens": (None, "Those of them whose KV was in the cache."),
    "generation_tokens": (None, "Tokens that were generated."),
    "kv_evicted_tokens": (None, "Tokens of KV that were forgotten to make room."),
    "kv_demoted_tokens": (None, "Tokens of KV that went to the second tier."),
    "kv_restored_tokens": (None, "Tokens of KV that came back from there."),
    "retractions": (None, "Times that a running request gave up its KV and its place in the batch for a while."),
    "rejections": ("reason", "Requests that were rejected, by reason."),
    "speech_seconds": (None, "Seconds of audio that were made."),
    "speech_failures": (None, "Texts whose audio ended with an error."),
    "invariant_breaches": (None, "Times that an idle engine found its own books wrong and started them afresh."),
}
HISTOGRAMS = {
    "time_to_first_token": (None, "From arrival to the first token of a stream."),
    "inter_token_latency": (None, "Between two tokens of a stream; tokens that came together share their time."),
    "e2e_request_latency": (None, "From arrival to the end, of requests that completed."),
    "queue_time": (None, "From arrival to the first place in a batch."),
    "prefill_time": (None, "From the first place in a batch to the first token."),
    "step_time": ("mode", "One step of the engine, by what it computed: extend (prompts), decode, mixed."),
    "schedule_time": (None, "Planning and recording one step."),
    "abort_latency": (None, "From the wish to cancel a request to the moment its KV was free."),
}


async def metrics(request: Request) -> Response:
    """All counters, gauges and histograms."""
    server: Server = request.app.state.server
    up = 1
    try:
        server.engine_metrics = await server.ask_engine("metrics", QUERY_LIMIT_S)
    except WeftError:
        up = 0
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(server, request.app.state.speech, up))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Snapshot(Collector):
    """The numbers of this moment; made anew for each request, so that there is no registry to keep."""

    def __init__(self, server: Server, desk: Desk, engine_up: int) -> None:
        engine, measures = server.engine_metrics, server.measures
        self._gauges: dict[str, Any] = dict(engine.get("gauges", {}))
        self._gauges["requests"] = server.states(self._gauges.get("requests", {}))
        self._gauges["engine_up"] = engine_up
        self._gauges["conversations"] = len(server.conversations)
        self._gauges["speech_utterances"] = {"open": desk.used}
        self._counters: dict[str, Any] = dict(engine.get("counters", {}))
        self._counters["requests_total"] = measures.outcomes
        self._counters["rejections_total"] = measures.rejections
        self._counters["speech_seconds_total"] = desk.seconds
        self._counters["speech_failures_total"] = desk.failures
        self._histograms: dict[str, Any] = dict(engine.get("histograms", {}))
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
            self._histograms[name] = getattr(measures, name).snapshot()

    def collect(self) -> Iterator[Metric]:
        for name, (label, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"weft_{name}", text, labels=_labels(label))
            for key, value in _by_label(label, self._gauges.get(name)):
                gauge.add_metric(key, value)
            yield gauge
        for name, (label, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"weft_{name}", text, labels=_labels(label))
            for key, value in _by_label(label, self._counters.get(f"{name}_total")):
                counter.add_metric(key, value)
            yield counter
        for name, (label, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"weft_{name}_seconds", text, labels=_labels(label))
            for key, snapshot in _by_label(label, self._histograms.get(name)):
                histogram.add_metric(key, _buckets(snapshot), snapshot["total"])
            yield histogram


def _labels(label: str | None) -> list[str]:
    return [] if label is None else [label]


def _by_label(label: str | None, value: Any) -> Iterable[tuple[list[str], Any]]:
    """(label values, number or snapshot) of each series; none while the engine has never answered."""
    if value is None:
        return []
    return [([], value)] if label is None else [([key], inner) for key, inner in value.items()]


def _buckets(snapshot: dict[str, Any]) -> list[tuple[str, float]]:
    """Prometheus wants cumulated counts, by upper bound."""
    bounds = [*(f"{bound:g}" for bound in snapshot["bounds"]), "+Inf"]
    return list(zip(bounds, map(float, accumulate(snapshot["counts"])), strict=True))
