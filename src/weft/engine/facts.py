"""What an engine tells about itself and its requests: /stats, /metrics, /v1/requests."""

from __future__ import annotations

from collections import deque
from typing import Any

from weft.core.histogram import Histogram
from weft.core.plan import StepMode
from weft.core.request import Request, RequestState
from weft.scheduler.scheduler import Scheduler

RECENT = 1000
"""So many ended requests are remembered."""


class Facts:
    """Watches one scheduler, whose adapters have these names. Read by the engine's own thread only.

    Attributes:
        breaches: how often an invariant did not hold.
        step_time: seconds of a step by its mode; `schedule_time`: of planning and recording one.
        batch: (rows, tokens) of the last step.
    """

    def __init__(self, scheduler: Scheduler, kv_bytes_per_token: int, adapters: tuple[str, ...] = ()) -> None:
        self.breaches = 0
        self.step_time: dict[StepMode, Histogram] = {"extend": Histogram(), "decode": Histogram(), "mixed": Histogram()}
        self.schedule_time = Histogram()
        self.last_step_s = 0.0
        self.batch = (0, 0)
        self._scheduler = scheduler
        self._bytes_per_token = kv_bytes_per_token
        self._adapters = (None, *adapters)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def note_end(self, request: Request, now_s: float) -> None:
        """A request has ended; its record is kept for a while."""
        self._recent.append(self._record(request, now_s) | {"ended_at_s": now_s})

    def stats(self, backend: str) -> dict[str, Any]:
        """The JSON of `GET /stats`."""
        scheduler = self._scheduler
        counts = scheduler.cache.counts()
        rows, tokens = self.batch if scheduler.running or scheduler.leaving else (0, 0)
        return {
            "requests": self._states() | {"finished": dict(scheduler.meters.finished)},
            "kv": {
                "capacity": counts.capacity,
                "free": counts.free,
                "cached": counts.cached,
                "active": counts.active,
                "host": counts.host,
                "evicted_total": counts.evicted_total,
                "bytes": (counts.capacity - counts.free) * self._bytes_per_token,
            },
            "sequence_ids": self._sequence_ids(),
            "batch": {"rows": rows, "tokens": tokens},
            "engine": {
                "backend": backend,
                "steps": scheduler.steps,
                "last_step_s": round(self.last_step_s, 6),
                "idle": not scheduler.has_work,
            },
        }

    def metrics(self, now_s: float) -> dict[str, Any]:
        """Counters, gauges and histograms under the names of `/metrics`, without their prefix."""
        scheduler, meters = self._scheduler, self._scheduler.meters
        counts, host = scheduler.cache.counts(), scheduler.cache.host
        return {
            "counters": {
                "requests_total": dict(meters.finished),
                "prompt_tokens_total": meters.prompt_tokens,
                "cached_tokens_total": meters.cached_tokens,
                "generation_tokens_total": meters.generation_tokens,
                "kv_evicted_tokens_total": counts.evicted_total,
                "kv_demoted_tokens_total": host.demoted_total if host is not None else 0,
                "kv_restored_tokens_total": host.restored_total if host is not None else 0,
                "retractions_total": meters.retractions,
                "rejections_total": dict(meters.rejections),
                "invariant_breaches_total": self.breaches,
            },
            "gauges": {
                "requests": self._states(),
                "kv_tokens": {"free": counts.free, "cached": counts.cached, "active": counts.active},
                "kv_host_tokens": counts.host,
                "sequence_ids": self._sequence_ids(),
                "batch_rows": len(scheduler.running) + len(scheduler.leaving),
                "sessions": len(scheduler.cache.sessions(now_s)),
            },
            "histograms": {
                "queue_time": meters.queue_time.snapshot(),
                "prefill_time": meters.prefill_time.snapshot(),
                "abort_latency": meters.abort_latency.snapshot(),
                "schedule_time": self.schedule_time.snapshot(),
                "step_time": {mode: histogram.snapshot() for mode, histogram in self.step_time.items()},
            },
        }

    def requests(self, now_s: float) -> list[dict[str, Any]]:
        """Live requests, then those that ended lately, the last to end first."""
        live = [self._record(request, now_s) for request in self._scheduler.live]
        return live + [self._aged(record, now_s) for record in reversed(self._recent)]

    def request(self, request_id: int, now_s: float) -> dict[str, Any] | None:
        """One of them; None when it is not known (any more)."""
        live = self._scheduler.find(request_id)
        if live is not None:
            return self._record(live, now_s)
        return next((self._aged(record, now_s) for record in self._recent if record["id"] == request_id), None)

    # ---- insides ----------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, int]:
        scheduler = self._scheduler
        return {
            "queued": len(scheduler.queued),
            "pending": scheduler.num_pending,
            "processing": len(scheduler.running),
        }

    def _sequence_ids(self) -> dict[str, int]:
        scheduler, sequences = self._scheduler, self._scheduler.cache.sequences
        if sequences is not None:
            return {"total": sequences.pool.total, "used": sequences.pool.total - sequences.pool.free}
        used = len(scheduler.running) + len(scheduler.leaving)
        return {"total": scheduler.limits.max_batch_size, "used": used}

    def _record(self, request: Request, now_s: float) -> dict[str, Any]:
        ending = request.ending
        reason = ending.finish_reason if ending is not None else None
        error = ending.error if ending is not None else None
        return {
            "id": request.request_id,
            "state": request.state.value,
            "priority": request.priority,
            "session_id": request.session_id,
            "adapter": self._adapters[request.adapter],
            "prompt_tokens": request.input_len,
            "cached_tokens": request.reused_tokens,
            "output_tokens": request.output_len,
            "miss": None
            if request.miss is None
            else {"reason": request.miss.reason, "at_token": request.miss.at_token},
            "chunks": request.chunks,
            "retractions": request.retractions,
            "finish_reason": None if reason is None else reason.value,
            "error": None if error is None else error.message,
            "times": _times(request, now_s),
            "age_s": round(now_s - request.arrival_s, 6),
            "kv": self._held(request.request_id),
        }

    def _aged(self, record: dict[str, Any], now_s: float) -> dict[str, Any]:
        """A remembered record as of now: how long ago it ended, and what of its KV is left."""
        ended_s = record["ended_at_s"]
        shown = {key: value for key, value in record.items() if key != "ended_at_s"}
        return shown | {"ended_s_ago": round(now_s - ended_s, 6), "kv": self._held(record["id"])}

    def _held(self, request_id: int) -> dict[str, int]:
        entry = self._scheduler.cache.ledger.entry(request_id)
        items = 0 if entry is None else entry.items
        return {"tokens": items, "bytes": items * self._bytes_per_token}


def _times(request: Request, now_s: float) -> dict[str, float]:
    """Seconds spent in each state that is not an end."""
    spent = dict.fromkeys((RequestState.QUEUED, RequestState.PENDING, RequestState.PROCESSING), 0.0)
    ends = [since for _, since in request.history[1:]] + [now_s]
    for (state, since), until in zip(request.history, ends, strict=True):
        if state in spent:
            spent[state] += max(0.0, until - since)
    return {f"{state.value}_s": round(seconds, 6) for state, seconds in spent.items()}
