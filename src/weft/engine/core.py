"""`EngineCore`: scheduler and backend joined, one step at a time. The engine process and `LLM` both run this.

Invariants: an exception of the backend ends the requests of its step and nothing else; after `MAX_FAILED_STEPS` failed
steps in a row the engine is declared dead, for then no request would ever end well.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from weft.backends.base import Backend, Geometry, Progress
from weft.config.settings import Settings
from weft.core.clock import Clock, MonotonicClock
from weft.core.errors import EngineError, InvalidRequestError, WeftError
from weft.core.plan import TokenLogprobs
from weft.core.request import Ending, Request, RequestState
from weft.core.sampling import SamplingParams
from weft.engine.sizing import resolve_context, resolve_kv_slots, resolve_limits
from weft.ipc.errors import error_info
from weft.ipc.messages import End, LogprobItem, Submit, TokenOutput
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.scheduler import Scheduler, Update

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


class EngineDead(EngineError):
    """No step works any more; the process has to end."""


class EngineCore:
    """Requests in, `TokenOutput`s out.

    Args:
        settings: resolved settings.
        backend: not loaded yet.
        clock: a virtual one in tests.
    """

    def __init__(self, settings: Settings, backend: Backend, clock: Clock | None = None) -> None:
        self.settings = settings
        self.backend = backend
        self.clock = clock or MonotonicClock()
        self.geometry: Geometry
        self.scheduler: Scheduler
        self._failed_steps = 0
        self._last_step_s = 0.0
        self._batch_rows = self._batch_tokens = 0
        self._next_scan_s = 0.0
        self._refused: list[TokenOutput] = []

    def load(self, progress: Progress | None = None) -> None:
        """Loads the model, makes the KV pool and the scheduler. Raises ModelLoadError or SettingsError."""
        self.geometry = self.backend.load(progress)
        limits = resolve_limits(self.settings, self.geometry)
        context = resolve_context(self.settings, self.geometry)
        slots = resolve_kv_slots(self.settings, self.geometry, limits, context)
        cache = PrefixCache(
            slots,
            page_size=self.settings.kv_cache.page_size,
            max_rows=limits.max_batch_size,
            max_len=min(context, slots),
            retain=self.settings.kv_cache.retain,
        )
        self.backend.allocate_kv(cache.capacity)
        self.scheduler = Scheduler(
            limits,
            cache,
            self.clock,
            max_context_tokens=context,
            vocab_size=self.geometry.vocab_size,
            eos_token_ids=self.geometry.eos_token_ids,
            seed=self.settings.scheduler.seed,
        )

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        """Queues a request; one that cannot be served gets its ending with the next outputs."""
        try:
            self._check_features(message.params)
            self.scheduler.add(
                message.request_id,
                np.frombuffer(message.token_ids, dtype=np.int32),
                message.params,
                priority=message.priority,
                arrival_s=message.arrival_s,
                deadline_s=message.deadline_s,
            )
        except WeftError as error:
            end = End("rejected", error=error_info(error))
            self._refused.append(TokenOutput(message.request_id, end=end))

    def abort(self, request_ids: list[int] | None) -> None:
        """Cancels requests (None: all); ids that are not known (any more) are ignored."""
        for request_id in request_ids if request_ids is not None else [r.request_id for r in self.scheduler.live]:
            self.scheduler.abort(request_id)

    def complete(self, request_id: int) -> None:
        """Ends a request whose text is complete."""
        self.scheduler.complete(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._refused)

    def step(self) -> list[TokenOutput]:
        """One turn: deadlines, plan, forward, apply.

        Raises EngineDead when the backend has failed for good; `take_outputs` then still has the last endings.
        """
        now = self.clock.now_s()
        if now >= self._next_scan_s:
            self.scheduler.expire()
            self._next_scan_s = now + self.settings.scheduler.deadline_scan_s
        plan = self.scheduler.plan()
        if plan is not None:
            self._batch_rows, self._batch_tokens = plan.num_rows, plan.num_tokens
            try:
                result = self.backend.forward(plan)
            except Exception as error:
                logger.exception("step %d failed", plan.step)
                self.scheduler.fail(plan, f"the engine failed in this step: {type(error).__name__}: {error}")
                self._failed_steps += 1
            else:
                self.scheduler.apply(plan, result)
                self._failed_steps = 0
            self._last_step_s = self.clock.now_s() - now
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDead(f"{self._failed_steps} steps in a row failed")
        return self.take_outputs()

    def take_outputs(self) -> list[TokenOutput]:
        """What happened since the last call."""
        outputs, self._refused = self._refused, []
        outputs.extend(_output(update) for update in self.scheduler.take_updates())
        return outputs

    # ---- facts ------------------------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Forgets all KV that no request holds; returns how many tokens."""
        return self.scheduler.cache.flush()

    def stats(self) -> dict[str, Any]:
        """The JSON of `GET /stats`."""
        scheduler = self.scheduler
        counts = scheduler.cache.counts()
        return {
            "requests": {
                "queued": len(scheduler.queued),
                "pending": len(scheduler.pending),
                "processing": len(scheduler.running),
                "finished": dict(scheduler.finished),
            },
            "kv": {
                "capacity": counts.capacity,
                "free": counts.free,
                "cached": counts.cached,
                "active": counts.active,
                "evicted_total": counts.evicted_total,
                "bytes": (counts.capacity - counts.free) * self.geometry.kv_bytes_per_token,
            },
            "sequence_ids": {"total": scheduler.limits.max_batch_size, "used": len(scheduler.running)},
            "batch": {
                "rows": self._batch_rows if scheduler.running else 0,
                "tokens": self._batch_tokens if scheduler.running else 0,
            },
            "engine": {
                "backend": self.backend.name,
                "steps": scheduler.steps,
                "last_step_s": round(self._last_step_s, 6),
                "idle": not scheduler.has_work,
            },
        }

    def _check_features(self, params: SamplingParams) -> None:
        wanted = {
            "logprobs": params.logprobs is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "logit_bias": bool(params.logit_bias),
            "penalties": params.has_penalties,
        }
        for name, asked in wanted.items():
            if asked and name not in self.backend.features:
                self.scheduler.finished[RequestState.REJECTED.value] += 1
                raise InvalidRequestError(f"{name}: the {self.backend.name} engine does not have it", param=name)


def _output(update: Update) -> TokenOutput:
    request, ending = update.request, update.ending
    return TokenOutput(
        request.request_id,
        tokens=update.tokens,
        logprobs=_items(update.logprobs),
        prompt_logprobs=_items(update.prompt_logprobs),
        end_token=ending.stop_token if ending is not None else None,
        end=_end(request, ending) if ending is not None else None,
    )


def _items(logprobs: list[TokenLogprobs] | None) -> list[LogprobItem] | None:
    if logprobs is None:
        return None
    return [LogprobItem(p.token_id, p.logprob, list(p.top_ids), list(p.top_logprobs)) for p in logprobs]


def _end(request: Request, ending: Ending) -> End:
    finished = request.finished_s or 0.0
    scheduled = request.first_scheduled_s if request.first_scheduled_s is not None else finished
    first_token = request.first_token_s if request.first_token_s is not None else finished
    told = ending.stop_token if ending.stop_token in request.params.stop_token_ids else None
    return End(
        state=ending.state.value,
        finish_reason=ending.finish_reason.value if ending.finish_reason is not None else None,
        stop=told,
        error=error_info(ending.error) if ending.error is not None else None,
        prompt_tokens=request.input_len,
        completion_tokens=request.output_len,
        cached_tokens=request.reused_tokens,
        queue_s=max(0.0, scheduled - request.arrival_s),
        prefill_s=max(0.0, first_token - scheduled),
        decode_s=max(0.0, finished - first_token),
    )
