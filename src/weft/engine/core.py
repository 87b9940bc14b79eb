"""`EngineCore`: scheduler and backend joined. The engine process and `LLM` both run this.

`begin` plans a step, somebody computes it (`run_step`, here or in a thread), `land` records what it gave. With
`depth` 2 a step may be begun while another one runs. `step` does all of it in one turn.

Invariants: an exception of the backend ends the requests of its step and nothing else; after `MAX_FAILED_STEPS` failed
steps in a row the engine is declared dead, for then no request would ever end well. The scheduler sees one time per
event, so that a recorded run can be replayed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

import weft
from weft.backends.base import Backend, Geometry, Progress, check_kind
from weft.backends.steps import StepCancelled
from weft.config.settings import Settings
from weft.core.clock import Clock, FrozenClock, MonotonicClock
from weft.core.errors import EngineError, InvalidRequestError, InvariantError, NotFoundError, WeftError
from weft.core.plan import PIECE_TOKENS, StepPlan, StepResult, TokenLogprobs
from weft.core.request import Ending, Request
from weft.engine.facts import Facts
from weft.engine.media import spans_of
from weft.engine.runner import Landing, run_step
from weft.engine.sizing import (
    resolve_adapters,
    resolve_context,
    resolve_depth,
    resolve_host_tokens,
    resolve_kv_slots,
    resolve_limits,
    resolve_resident_tokens,
)
from weft.engine.trace import CacheShape, Header, ModelFacts, Recorder, keep_older
from weft.ipc.errors import error_info
from weft.ipc.messages import CacheMissInfo, End, Heartbeat, LogprobItem, Submit, TokenOutput
from weft.kv.snapshot import snapshot
from weft.scheduler.scheduler import Scheduler, Update

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
CHECK_INTERVAL_S = 5.0
"""An idle engine proves its invariants at most this often, and only if it has worked since."""
CHECK_QUIET_S = 0.25
"""Idle: the last step was planned so long ago. A proof over millions of slots takes a while, and holds up who comes."""
CHECK_SHARE = 0.005
"""At most this share of the time goes into proofs."""


class EngineDead(EngineError):
    """No step works any more; the process has to end."""


class EngineCore:
    """Requests in, `TokenOutput`s out.

    Args:
        settings: resolved settings.
        backend: not loaded yet.
        clock: a virtual one in tests.

    Attributes, after `load`:
        depth: steps that may be in flight at once, 1 or 2.
    """

    def __init__(self, settings: Settings, backend: Backend, clock: Clock | None = None) -> None:
        self.settings = settings
        self.backend = backend
        self.clock = clock or MonotonicClock()
        self.geometry: Geometry
        self.scheduler: Scheduler
        self.facts: Facts
        self.depth = 1
        self._now = FrozenClock(self.clock)
        self._failed_steps = 0
        self._next_scan_s = 0.0
        self._next_check_s = 0.0
        self._unproven = False
        self._planned_s = 0.0
        self._refused: list[TokenOutput] = []
        self._recorder: Recorder | None = None

    def load(self, progress: Progress | None = None) -> None:
        """Loads the model, makes the KV pool and the scheduler. Raises ModelLoadError or SettingsError."""
        self.geometry = self.backend.load(progress)
        limits = resolve_limits(self.settings, self.geometry)
        context = resolve_context(self.settings, self.geometry)
        slots = resolve_kv_slots(self.settings, self.geometry, limits, context)
        kv = self.settings.kv_cache
        self.depth = resolve_depth(self.settings, self.geometry)
        header = Header(
            weft=weft.__version__,
            note=self.geometry.description,
            depth=self.depth,
            limits=limits,
            cache=CacheShape(
                capacity=slots,
                page_size=kv.page_size,
                max_rows=limits.max_batch_size,
                max_len=min(context, slots),
                retain=kv.retain,
                eviction_policy=kv.eviction_policy,
                eviction_threshold=kv.eviction_threshold,
                bytes_per_token=self.geometry.kv_bytes_per_token,
                num_sequences=self.geometry.num_sequences,
                shares=self.geometry.shares_prefixes,
                host_tokens=resolve_host_tokens(self.settings, self.geometry),
                resident_tokens=resolve_resident_tokens(self.settings),
                piece_tokens=self.geometry.piece_tokens or PIECE_TOKENS,
            ),
            model=ModelFacts(
                max_context_tokens=context,
                vocab_size=self.geometry.vocab_size,
                eos_token_ids=self.geometry.eos_token_ids,
                seed=self.settings.scheduler.seed,
                adapters=resolve_adapters(self.settings, self.geometry),
            ),
        )
        self.scheduler = header.make(self._now)
        self.backend.allocate_kv(self.scheduler.cache.capacity)
        self.facts = Facts(self.scheduler, self.geometry.kv_bytes_per_token, tuple(self.settings.model.lora))
        if self.settings.engine.record is not None:
            path = Path(self.settings.engine.record)
            keep_older(path)  # with `engine.restart`, it tells why this engine had to start
            self._recorder = Recorder(path, header)

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        """Queues a request; one that cannot be served gets its ending with the next outputs."""
        now = self._now.refresh()
        prompt_ids = np.frombuffer(message.token_ids, dtype=np.int32)
        facts: dict[str, Any] = {
            "priority": message.priority,
            "arrival_s": message.arrival_s,
            "deadline_s": message.deadline_s,
            "session_id": message.session_id,
            "session_ttl_s": message.session_ttl_s,
            "adapter": message.adapter,
        }
        if message.resume_ids:
            facts["resume_ids"] = np.frombuffer(message.resume_ids, dtype=np.int32)
        try:
            try:
                self._check_features(message)
                facts["media"] = spans_of(message.media, len(prompt_ids), message.adapter)
            except WeftError:
                self.scheduler.meters.note_rejection("invalid")
                raise
            if self._recorder is not None:
                self._recorder.add(now, message.request_id, prompt_ids, message.params, **facts)
            self.scheduler.add(message.request_id, prompt_ids, message.params, **facts)
            if message.complete:
                self.complete(message.request_id)
        except WeftError as error:
            if self._recorder is not None:
                self._recorder.refused(now, message.request_id, error)
            end = End("rejected", error=error_info(error))
            self._refused.append(TokenOutput(message.request_id, end=end))

    def abort(self, request_ids: list[int], since_s: float | None = None) -> None:
        """Cancels requests; ids that are not known (any more) are ignored.

        `since_s` is when that was wanted, on the engine's clock.
        """
        now = self._now.refresh()
        for request_id in request_ids:
            if self._recorder is not None:
                self._recorder.abort(now, request_id, since_s)
            self.scheduler.abort(request_id, since_s)

    def complete(self, request_id: int) -> None:
        """Ends a request whose text is complete."""
        now = self._now.refresh()
        if self._recorder is not None:
            self._recorder.complete(now, request_id)
        self.scheduler.complete(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._refused)

    # ---- steps ------------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        """When `tick` has something to do next, on the engine's clock."""
        return self._next_scan_s

    def tick(self) -> None:
        """Deadlines, ends of sessions, cleaning up: what goes by the clock; cheap when nothing is due."""
        now = self._now.refresh()
        if now < self._next_scan_s:
            return
        scan_s, cleanup_s = self.settings.scheduler.deadline_scan_s, self.settings.kv_cache.cleanup_interval_s
        self._next_scan_s = now + min(scan_s, cleanup_s)
        if self._recorder is not None:
            self._recorder.expire(now)
        self.scheduler.expire()
        quiet = not self.scheduler.has_work and now >= self._planned_s + CHECK_QUIET_S
        if self._unproven and quiet and now >= self._next_check_s:
            start_s = time.perf_counter()
            self._prove()
            self._next_check_s = now + max(CHECK_INTERVAL_S, (time.perf_counter() - start_s) / CHECK_SHARE)

    def begin(self) -> StepPlan | None:
        """The next step to compute; None when nothing can run before something else happens."""
        now = self._now.refresh()
        if not self.scheduler.has_work:
            return None
        start_s = time.perf_counter()
        plan = self.scheduler.plan()
        if self._recorder is not None:
            self._recorder.plan(now, plan)
        if plan is not None:
            self.facts.schedule_time.observe(time.perf_counter() - start_s)
            self.facts.batch = (plan.num_rows, plan.num_tokens)
            self._unproven = True
            self._planned_s = now
        return plan

    def land(self, landing: Landing) -> None:
        """Records a step that is over. Raises EngineDead when the backend has failed for good."""
        now = self._now.refresh()
        plan, outcome = landing.plan, landing.outcome
        self.facts.last_step_s = landing.seconds
        start_s = time.perf_counter()
        if isinstance(outcome, StepCancelled):
            if self._recorder is not None:
                self._recorder.cancelled(now, plan)
            self.scheduler.cancelled(plan)
            return
        fault = outcome if isinstance(outcome, Exception) else _fault(plan, outcome)
        if fault is None:
            assert isinstance(outcome, StepResult)
            if self._recorder is not None:
                self._recorder.apply(now, plan, outcome)
            self.scheduler.apply(plan, outcome)
            self._failed_steps = 0
            self.facts.step_time[plan.mode].observe(landing.seconds)
            self.facts.schedule_time.observe(time.perf_counter() - start_s)
            return
        logger.error("step %d failed", plan.step, exc_info=fault)
        message = f"the engine failed in this step: {type(fault).__name__}: {fault}"
        if self._recorder is not None:
            self._recorder.fail(now, plan, message)
        self.scheduler.fail(plan, message)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDead(f"{self._failed_steps} steps in a row failed")

    def step(self) -> list[TokenOutput]:
        """One turn: deadlines, plan, forward, apply.

        Raises EngineDead when the backend has failed for good; `take_outputs` then still has the last endings.
        """
        self.tick()
        plan = self.begin()
        if plan is not None:
            self.land(run_step(self.backend, plan))
        return self.take_outputs()

    def take_outputs(self) -> list[TokenOutput]:
        """What happened since the last call."""
        outputs, self._refused = self._refused, []
        updates = self.scheduler.take_updates()
        if self._recorder is not None:
            self._recorder.updates(self._now.now_s(), updates)
        for update in updates:
            outputs.append(_output(update))
            if update.ending is not None:
                self.facts.note_end(update.request, self._now.now_s())
        return outputs

    def end_recording(self) -> None:
        """Writes what is left of a trace, if one is recorded. May be called twice, and from any thread."""
        if self._recorder is not None:
            self._recorder.close()

    def close(self) -> None:
        """Ends a recording and gives the model's memory back. May be called twice."""
        self.end_recording()
        self.backend.close()

    # ---- facts ------------------------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Forgets all KV that no request and no session holds; returns how many tokens."""
        now = self._now.refresh()
        if self._recorder is not None:
            self._recorder.flush(now)
        return self.scheduler.cache.flush()

    def stats(self) -> dict[str, Any]:
        """The JSON of `GET /stats`."""
        return self.facts.stats(self.backend.name)

    def metrics(self) -> dict[str, Any]:
        """See `Facts.metrics`."""
        return self.facts.metrics(self._now.refresh())

    def requests(self) -> list[dict[str, Any]]:
        """See `Facts.requests`."""
        return self.facts.requests(self._now.refresh())

    def request(self, request_id: int) -> dict[str, Any]:
        """One live or recent request. Raises NotFoundError."""
        record = self.facts.request(request_id, self._now.refresh())
        if record is None:
            raise NotFoundError(f"request {request_id} is not known here (any more)", param="request_id")
        return record

    def beat(self) -> Heartbeat:
        """How it is."""
        scheduler = self.scheduler
        counts, queued = scheduler.cache.counts(), scheduler.queued
        return Heartbeat(
            "engine",
            scheduler.steps,
            len(queued),
            scheduler.retry_after_s,
            round(scheduler.speed.work_s(len(queued), queued.uncached_tokens), 3),
            scheduler.speed.prompt_tokens_per_s,
            counts.cached + counts.active + counts.host,
            len(scheduler.cache.leases),
        )

    def sessions(self) -> list[dict[str, Any]]:
        """The sessions whose KV is kept."""
        return self.scheduler.cache.sessions(self._now.refresh())

    def cache(self) -> dict[str, Any]:
        """See `weft.kv.snapshot`."""
        return snapshot(self.scheduler.cache, self._now.refresh())

    def end_session(self, session_id: str) -> dict[str, Any]:
        """Ends a session and its requests. Raises NotFoundError when there is neither."""
        now = self._now.refresh()
        if self._recorder is not None:
            self._recorder.end_session(now, session_id)
        ended, aborted = self.scheduler.end_session(session_id)
        if not ended and not aborted:
            raise NotFoundError(f"session {session_id!r} is not known here (any more)", param="session_id")
        return {"ended": ended, "aborted": aborted}

    # ---- insides ----------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Checks everything while nothing runs; a breach is a bug, which must not take the server down."""
        self._unproven = False
        try:
            self.scheduler.check()
        except InvariantError:
            self.facts.breaches += 1
            logger.exception("an invariant does not hold; the KV cache starts afresh")
            if self._recorder is not None:
                self._recorder.reset(self._now.now_s())
            self.scheduler.cache.reset()

    def _check_features(self, message: Submit) -> None:
        params = message.params
        check_kind(self.backend.features, embeds=params.embed)
        wanted = {
            "logprobs": params.logprobs is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "logit_bias": bool(params.logit_bias),
            "penalties": params.has_penalties,
            **{place.item.kind: True for place in message.media},
        }
        for name, asked in wanted.items():
            if asked and name not in self.backend.features:
                raise InvalidRequestError(f"{name}: the {self.backend.name} engine does not have it", param=name)


def _fault(plan: StepPlan, result: Any) -> Exception | None:
    """What is wrong with the form of a result; its contents are judged row by row."""
    if not isinstance(result, StepResult):
        return TypeError(f"the backend returned {type(result).__name__}")
    if np.shape(result.tokens) != (plan.num_rows,):
        return ValueError(f"the backend returned tokens of shape {np.shape(result.tokens)} for {plan.num_rows} rows")
    missing = [row for row in plan.embeds if row not in result.embeddings and row not in result.errors]
    if missing:
        return ValueError(f"the backend returned no vectors for the rows {missing}")
    return None


def _output(update: Update) -> TokenOutput:
    request, ending = update.request, update.ending
    return TokenOutput(
        request.request_id,
        tokens=update.tokens,
        logprobs=_items(update.logprobs),
        prompt_logprobs=_items(update.prompt_logprobs),
        embedding=None if update.embedding is None else update.embedding.astype("<f4", copy=False).tobytes(),
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
    miss = request.miss
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
        retractions=request.retractions,
        miss=None if miss is None else CacheMissInfo(miss.reason, miss.at_token),
    )
