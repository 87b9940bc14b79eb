"""What a run was like: latencies, counts and, after every step, how full everything was. Virtual seconds throughout."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.core.plan import StepPlan
from weft.core.request import Request, RequestState
from weft.scheduler.scheduler import Scheduler, Update
from weft.sim.options import Slo

Floats = npt.NDArray[np.float64]

SAMPLE_FIELDS = (
    "time_s",
    "queued",
    "pending",
    "rows",
    "prompt_tokens",
    "decode_tokens",
    "kv_free",
    "kv_cached",
    "kv_leased",
    "kv_active",
)


@dataclass(frozen=True, slots=True)
class Record:
    """One request that has ended. Times are from its arrival; None: it did not come to that."""

    request_id: int
    state: RequestState
    reason: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    itl_s: float | None
    total_s: float
    retractions: int

    def meets(self, slo: Slo) -> bool:
        """Whether it is a good answer."""
        return (
            self.state is RequestState.COMPLETED
            and self.ttft_s is not None
            and self.ttft_s <= slo.ttft
            and (self.itl_s is None or self.itl_s <= slo.itl)
        )


class Measure:
    """Collects; cheap enough for every token.

    Attributes:
        records: ended requests, in the order of their ends.
        refused: requests that never got in, by the error's code.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.refused: dict[str, int] = {}
        self.steps = 0
        self.modes = {"extend": 0, "decode": 0, "mixed": 0}
        self._samples = array("d")
        self._last_s: dict[int, float] = {}
        self._gaps = array("d")

    def note_tokens(self, now_s: float, ids: Iterable[int]) -> None:
        """Each of these requests got a token."""
        last = self._last_s
        for request_id in ids:
            before = last.get(request_id)
            if before is not None:
                self._gaps.append(now_s - before)
            last[request_id] = now_s

    def note_refusal(self, code: str | None) -> None:
        code = code or "refused"
        self.refused[code] = self.refused.get(code, 0) + 1

    def note_ending(self, update: Update) -> None:
        request, ending = update.request, update.ending
        assert ending is not None
        last_s = self._last_s.pop(request.request_id, None)
        reason = ending.finish_reason
        self.records.append(
            Record(
                request_id=request.request_id,
                state=ending.state,
                reason=reason.value if reason is not None else ending.error.code if ending.error is not None else None,
                input_tokens=request.input_len,
                cached_tokens=request.reused_tokens,
                output_tokens=request.output_len,
                ttft_s=_since(request, request.first_token_s),
                itl_s=_mean_gap(request, last_s),
                total_s=_since(request, request.finished_s) or 0.0,
                retractions=request.retractions,
            )
        )

    def note_step(self, now_s: float, scheduler: Scheduler, plan: StepPlan) -> None:
        """A step has landed."""
        self.steps += 1
        self.modes[plan.mode] += 1
        counts = scheduler.cache.counts()
        decode = int((plan.extend_lens == 1).sum()) if plan.mode == "mixed" else plan.num_rows
        decode = 0 if plan.mode == "extend" else decode
        self._samples.extend(
            (
                now_s,
                len(scheduler.queued),
                scheduler.num_pending,
                plan.num_rows,
                plan.num_tokens - decode,
                decode,
                counts.free,
                counts.cached,
                counts.leased,
                counts.active,
            )
        )

    @property
    def gaps(self) -> Floats:
        """Every time between two tokens of one request."""
        return np.frombuffer(self._gaps, dtype=np.float64) if self._gaps else np.zeros(0)

    def samples(self) -> dict[str, Floats]:
        """By name of `SAMPLE_FIELDS`, one value a step."""
        flat = np.frombuffer(self._samples, dtype=np.float64) if self._samples else np.zeros(0)
        table = flat.reshape(-1, len(SAMPLE_FIELDS))
        return {name: table[:, i] for i, name in enumerate(SAMPLE_FIELDS)}


def percentiles(values: Floats | list[float], shares: tuple[float, ...] = (50, 90, 99)) -> list[float] | None:
    """None where there are no values."""
    if len(values) == 0:
        return None
    return [float(v) for v in np.percentile(np.asarray(values), shares)]


def _since(request: Request, time_s: float | None) -> float | None:
    return None if time_s is None else max(0.0, time_s - request.arrival_s)


def _mean_gap(request: Request, last_s: float | None) -> float | None:
    generated = request.output_len - request.resumed_len
    if last_s is None or request.first_token_s is None or generated < 2:
        return None
    return (last_s - request.first_token_s) / (generated - 1)
