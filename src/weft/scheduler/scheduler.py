"""`Scheduler`: owns every live request from arrival to its one ending.

`plan()` decides, a backend computes, `apply(plan, result)` records. Between the two a request may be aborted or run out
of time: it is only marked, and ends when its step lands. Updates (tokens and endings) collect in `take_updates()`.

Invariants: a live request is in exactly one of `queued`, `pending`, `running`; every accepted request gets exactly one
update with an ending; `_end` is the only caller of `Request.finish` and of the cache's release.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.core.clock import Clock
from weft.core.errors import (
    CancelledError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    InvariantError,
    QueueFullError,
    WeftError,
)
from weft.core.plan import Int32s, StepMode, StepPlan, StepResult, TokenLogprobs
from weft.core.request import Ending, FinishReason, Request, RequestState
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.limits import Limits
from weft.scheduler.pace import Pace
from weft.scheduler.planner import Row, build_plan
from weft.scheduler.policy import ordered
from weft.scheduler.prefill import PrefillAdder, Verdict

_U64 = 2**64


@dataclass(slots=True)
class Update:
    """What happened to one request: new tokens, log probabilities, an ending."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    ending: Ending | None = None


class Scheduler:
    """See the module's docstring.

    Args:
        limits: resolved limits.
        cache: the KV cache, with at least `limits.max_batch_size` rows.
        clock: time of arrivals and deadlines.
        max_context_tokens: longest sequence of the model.
        vocab_size: token ids are below it.
        eos_token_ids: end tokens of the model.
        seed: requests without a seed of their own draw theirs from this one and their id.
    """

    def __init__(
        self,
        limits: Limits,
        cache: PrefixCache,
        clock: Clock,
        *,
        max_context_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.vocab_size = vocab_size
        self.steps = 0
        self.finished = {state.value: 0 for state in RequestState if state.terminal}
        self._clock = clock
        self._max_len = min(max_context_tokens, cache.capacity)
        self.max_context_tokens = max_context_tokens
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self.queued: dict[int, Request] = {}
        self.pending: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self._chunked: Request | None = None
        self._in_flight: dict[int, list[Row]] = {}
        self._marked: dict[int, Ending] = {}
        self._updates: list[Update] = []
        self._pace = Pace()
        self._arrived = 0
        self._served = 0  # those that came and wait for their first step no longer

    # ---- requests come and go ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.queued or self.pending or self.running)

    @property
    def live(self) -> list[Request]:
        return [*self.queued.values(), *self.pending.values(), *self.running.values()]

    def add(
        self,
        request_id: int,
        prompt_ids: Int32s,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Request:
        """Takes a request into the queue. Raises InvalidRequestError or QueueFullError; then nothing stays behind."""
        try:
            limit = self._checked_limit(prompt_ids, params)
            if len(self.queued) >= self.limits.max_queue_size and not self._has_place:
                raise QueueFullError(
                    f"the waiting queue is full ({self.limits.max_queue_size} requests)",
                    retry_after_s=self._pace.seconds_for(len(self.queued) / 2),
                )
        except WeftError:
            self.finished[RequestState.REJECTED.value] += 1
            raise
        if self._find(request_id) is not None:
            raise InvariantError(f"request id {request_id} is in use")
        request = Request(
            request_id,
            prompt_ids,
            params,
            max_device_len=limit,
            seed=params.seed % _U64 if params.seed is not None else _mix(self._seed, request_id),
            eos_token_ids=self._eos_token_ids,
            arrival_s=self._clock.now_s() if arrival_s is None else arrival_s,
            priority=priority,
            deadline_s=deadline_s,
        )
        request.turn = self._arrived
        self._arrived += 1
        self.queued[request_id] = request
        self._fill_running_set()
        return request

    def abort(self, request_id: int) -> bool:
        """Cancels a request at any stage; False if there is none (any more)."""
        error = CancelledError("the request was cancelled")
        return self._stop(request_id, Ending(RequestState.CANCELLED, error=error))

    def complete(self, request_id: int) -> bool:
        """Ends a request whose text is complete (a stop string was found); False if there is none (any more)."""
        return self._stop(request_id, Ending(RequestState.COMPLETED, FinishReason.STOP))

    def expire(self) -> None:
        """Ends what has waited or run too long; to be called on a timer."""
        now = self._clock.now_s()
        for request in self.live:
            message = self._overdue(request, now)
            if message is not None:
                self._stop(request.request_id, Ending(RequestState.TIMEOUT, error=DeadlineError(message)))

    def take_updates(self) -> list[Update]:
        """What happened since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    # ---- one step ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decides the next step; None when nothing can run."""
        self._fill_running_set()
        decoding = [r for r in self.running.values() if r is not self._chunked and not r.in_flight]
        adder = PrefillAdder(self.cache, self.limits, list(self.running.values()))
        if self._chunked is not None:
            if self._chunked.in_flight:
                return None
            adder.continue_chunked(self._chunked)
        if not adder.full:
            for request in self._ordered(self.pending):
                if adder.add(request) is Verdict.STOP:
                    break
        self._start(adder)
        rows = adder.taken
        mode: StepMode = "extend"
        if not rows or self.limits.mixed:
            mode = "mixed" if rows and decoding else "extend" if rows else "decode"
            rows = rows + [(request, 1) for request in decoding]
        if not rows:
            return None
        plan = build_plan(self.steps, mode, rows, self.cache)
        for request, _ in rows:
            request.in_flight = True
        self._in_flight[plan.step] = rows
        self.steps += 1
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Records what a step gave. Reads the plan and the result, not what has become of the requests since."""
        rows = self._land(plan)
        for index, (request, count) in enumerate(rows):
            request.advance(count)
            error = result.errors.get(index)
            token = int(result.tokens[index])
            if error is None and plan.emits[index] and not 0 <= token < self.vocab_size:
                error = f"the engine chose token {token}, which is not in the vocabulary"
            if error is not None:
                self._end_failed(request, error)
                continue
            self._record(request, token if plan.emits[index] else None, index, result)

    def fail(self, plan: StepPlan, message: str) -> None:
        """The whole step failed: its requests end, the others go on."""
        for request, _ in self._land(plan):
            self._end_failed(request, message)

    def check(self) -> None:
        """Proves all invariants; raises InvariantError."""
        self.cache.check(self.live)
        for container, state in (
            (self.queued, RequestState.QUEUED),
            (self.pending, RequestState.PENDING),
            (self.running, RequestState.PROCESSING),
        ):
            for request in container.values():
                if request.state is not state:
                    raise InvariantError(f"{request!r} is kept among the {state.value}")
                if (request.row >= 0) != (state is RequestState.PROCESSING):
                    raise InvariantError(f"{request!r} has table row {request.row}")
        if len(self.running) > self.limits.max_batch_size:
            raise InvariantError(f"{len(self.running)} running, limit {self.limits.max_batch_size}")
        if len(self.running) + len(self.pending) > self.limits.max_concurrent_requests:
            raise InvariantError(f"running set of {len(self.running) + len(self.pending)}")
        counts = self.cache.counts()
        if counts.free + counts.cached + counts.active != counts.capacity or min(counts.free, counts.active) < 0:
            raise InvariantError(f"KV does not add up: {counts}")

    # ---- insides ----------------------------------------------------------------------------------------------

    def _checked_limit(self, prompt_ids: Int32s, params: SamplingParams) -> int:
        """`max_device_len` of a request with this prompt. Raises InvalidRequestError where it cannot be served."""
        params.check_vocabulary(self.vocab_size)
        length = len(prompt_ids)
        if length == 0:
            raise InvalidRequestError("prompt: it is empty (at least one token is needed)", param="prompt")
        low, high = int(prompt_ids.min()), int(prompt_ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"prompt: token id {bad} is not in the vocabulary (allowed: 0 to {self.vocab_size - 1})", param="prompt"
            )
        max_input = min(self._max_len - 1, self.limits.max_input_tokens or self._max_len)
        if length > max_input:
            raise InvalidRequestError(
                f"prompt: it has {length} tokens, but at most {max_input} are allowed"
                f" (context {self.max_context_tokens} tokens, KV cache {self.cache.capacity} tokens)",
                param="prompt",
                code="context_length_exceeded",
            )
        wanted = params.max_new_tokens
        room = self.max_context_tokens - length
        if wanted is not None and wanted > room:
            raise InvalidRequestError(
                f"max_tokens: {length} prompt tokens and {wanted} new ones exceed the context of"
                f" {self.max_context_tokens} tokens (allowed: at most {room} new ones)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        max_output = self.limits.max_output_tokens
        if wanted is not None and max_output is not None and wanted > max_output:
            raise InvalidRequestError(
                f"max_tokens: {wanted} is not allowed (allowed: at most {max_output})", param="max_tokens"
            )
        limit = room if wanted is None else wanted
        if max_output is not None:
            limit = min(limit, max_output)
        return min(length + limit, self._max_len)

    @property
    def _has_place(self) -> bool:
        return len(self.pending) + len(self.running) < self.limits.max_concurrent_requests

    def _fill_running_set(self) -> None:
        places = self.limits.max_concurrent_requests - len(self.pending) - len(self.running)
        if places <= 0 or not self.queued:
            return
        candidates = list(self.queued.values())
        if len(candidates) > places:
            candidates = self._ordered(self.queued)[:places]
        now = self._clock.now_s()
        for request in candidates:
            del self.queued[request.request_id]
            request.admit(now)
            self.pending[request.request_id] = request

    def _ordered(self, waiting: dict[int, Request]) -> list[Request]:
        return ordered(waiting.values(), self.limits, self.cache.peek, self._served)

    def _start(self, adder: PrefillAdder) -> None:
        """Moves what the adder took into the batch."""
        now = self._clock.now_s()
        for request, _ in adder.taken:
            if request.state is RequestState.PENDING:
                del self.pending[request.request_id]
                request.schedule(now)
                self._served += 1
                request.reused_tokens = request.cached_len
                self.running[request.request_id] = request
            request.chunks += 1
        self._chunked = adder.chunked

    def _land(self, plan: StepPlan) -> list[Row]:
        rows = self._in_flight.pop(plan.step)
        for request, _ in rows:
            request.in_flight = False
        return rows

    def _record(self, request: Request, token: int | None, index: int, result: StepResult) -> None:
        marked = self._marked.get(request.request_id)
        if marked is not None:
            self._end(request, marked)
            return
        update = Update(request, prompt_logprobs=result.prompt_logprobs.get(index))
        if token is None:
            self.cache.cache_unfinished(request)
        else:
            if request.output_len == 0:
                request.first_token_s = self._clock.now_s()
                self.cache.cache_unfinished(request)
            ending = request.append(token)
            update.tokens.append(token)
            if index in result.logprobs:
                update.logprobs = [result.logprobs[index]]
            if ending is not None:
                self._end(request, ending, update)
                return
        if update.tokens or update.prompt_logprobs:
            self._updates.append(update)

    def _stop(self, request_id: int, ending: Ending) -> bool:
        request = self._find(request_id)
        if request is None:
            return False
        if request.in_flight:
            self._marked.setdefault(request_id, ending)
        elif ending.state is RequestState.COMPLETED and request.state is not RequestState.PROCESSING:
            raise InvariantError(f"{request!r} cannot be complete, it has not run")
        else:
            self._end(request, ending)
        return True

    def _end_failed(self, request: Request, message: str) -> None:
        """Its computation failed; who was marked before ends as marked. The new KV is worth nothing either way."""
        failed = Ending(RequestState.FAILED, error=EngineError(message))
        self._end(request, self._marked.get(request.request_id, failed), keep=False)

    def _end(self, request: Request, ending: Ending, update: Update | None = None, *, keep: bool = True) -> None:
        """The one place where a request ends: state, KV and row, containers, counters, its last update."""
        now = self._clock.now_s()
        request.finish(ending, now)
        self._pace.note(now)
        self._served += request.first_scheduled_s is None
        self.cache.cache_finished(request, keep=keep)
        for container in (self.queued, self.pending, self.running):
            container.pop(request.request_id, None)
        self._marked.pop(request.request_id, None)
        if self._chunked is request:
            self._chunked = None
        self.finished[ending.state.value] += 1
        update = update if update is not None else Update(request)
        update.ending = ending
        self._updates.append(update)

    def _find(self, request_id: int) -> Request | None:
        for container in (self.running, self.pending, self.queued):
            request = container.get(request_id)
            if request is not None:
                return request
        return None

    def _overdue(self, request: Request, now: float) -> str | None:
        if request.deadline_s is not None and now >= request.deadline_s:
            return f"timeout_s: the request's own deadline passed after {now - request.arrival_s:.1f} s"
        limit = self.limits.queue_timeout_s
        if request.admitted_s is None:
            if limit is not None and now - request.arrival_s >= limit:
                return f"the request waited longer than http.queue_timeout_s ({limit} s)"
            return None
        limit = self.limits.request_timeout_s
        if limit is not None and now - request.admitted_s >= limit:
            return f"the request ran longer than http.request_timeout_s ({limit} s)"
        return None


def _mix(seed: int, request_id: int) -> int:
    """A 64-bit seed from two numbers, after splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (request_id + 1) * 0xBF58476D1CE4E5B9) % _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % _U64
    return z ^ (z >> 31)
