"""`Roster`: everybody that is here: who waits, who runs, who leaves; and how one comes and goes.

A request that ends while a step with it is in flight ends at once for its client; its KV and its row are kept until the
last step with it has landed, since that step still reads and writes them. Till then it is `leaving`.

Invariants: a request that has not ended is in exactly one of `queued`, `pending`, `retracted`, `running`; every
accepted request gets exactly one update with an ending; `_end` is the only caller of `Request.finish`, `_release` the
only one that takes KV and row back for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.core.clock import Clock
from weft.core.errors import (
    CancelledError,
    DeadlineError,
    DisplacedError,
    EngineError,
    InvalidRequestError,
    InvariantError,
    QueueFullError,
    WeftError,
)
from weft.core.media import MediaSpan
from weft.core.plan import Float32s, Int32s, TokenLogprobs
from weft.core.request import Ending, FinishReason, Request, RequestState
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.admission import Admission, overdue
from weft.scheduler.limits import Limits
from weft.scheduler.meters import Meters
from weft.scheduler.prefill import reuses_cache
from weft.scheduler.speed import Speed
from weft.scheduler.waiting import WaitingLine, mix

_U64 = 2**64


@dataclass(slots=True)
class Update:
    """What happened to one request: new tokens, log probabilities, its vector, an ending."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: Float32s | None = None
    ending: Ending | None = None


class Roster:
    """See the module's docstring. `Scheduler` adds the steps, and has the arguments in its own.

    Attributes:
        queued, pending, retracted, running: requests by where they stand; retracted ones are PENDING, first in line.
        leaving: requests that have ended, and whose last step is in flight.
        meters, speed: what was counted and measured.
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
        adapters: int = 0,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.meters = Meters()
        self.speed = Speed()
        self.queued = WaitingLine(limits, cache.tree, seed)
        self.pending = WaitingLine(limits, cache.tree, seed)
        self.retracted: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        self._admission = Admission(
            limits,
            max_context_tokens=max_context_tokens,
            capacity=cache.capacity,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self._adapters = adapters
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._chunked: Request | None = None
        self._worthless: dict[int, None] = {}  # leaving requests whose new KV must not be kept
        self._aborted_s: dict[int, float] = {}
        self._next_cleanup_s = 0.0
        self._updates: list[Update] = []

    # ---- requests come and go ---------------------------------------------------------------------------------

    @property
    def max_context_tokens(self) -> int:
        return self._admission.max_context_tokens

    @property
    def vocab_size(self) -> int:
        return self._admission.vocab_size

    @property
    def has_work(self) -> bool:
        return bool(self.queued or self.pending or self.retracted or self.running or self.leaving)

    @property
    def live(self) -> list[Request]:
        """Everybody that has not ended."""
        return [*self.queued.values(), *self.waiting_in_set, *self.running.values()]

    @property
    def waiting_in_set(self) -> list[Request]:
        """The PENDING ones."""
        return [*self.retracted.values(), *self.pending.values()]

    @property
    def num_pending(self) -> int:
        return len(self.pending) + len(self.retracted)

    @property
    def retry_after_s(self) -> float:
        """How long whoever finds the queue full should wait."""
        return self.speed.retry_after_s(len(self.queued), self.queued.uncached_tokens)

    def add(
        self,
        request_id: int,
        prompt_ids: Int32s,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        deadline_s: float | None = None,
        session_id: str | None = None,
        session_ttl_s: float | None = None,
        adapter: int = 0,
        resume_ids: Int32s | None = None,
        media: tuple[MediaSpan, ...] = (),
    ) -> Request:
        """Takes a request into the queue. Raises InvalidRequestError or QueueFullError; then nothing stays behind.

        `resume_ids`: what was generated for it elsewhere. It is computed again with the prompt, as after a retraction,
        and told to nobody; a request that has no more to generate ends here.
        """
        if self.find(request_id) is not None or request_id in self.leaving:
            raise InvariantError(f"request id {request_id} is in use")
        if not 0 <= adapter <= self._adapters:
            raise InvariantError(f"request {request_id}: adapter {adapter} of {self._adapters}")
        try:
            limit = self._admission.max_device_len(prompt_ids, params)
            if session_id is not None and not self.cache.leases_kv:
                why = "with kv_cache.retain 'none' no KV is kept"
                if self.cache.retain == "prefix":
                    why = "the KV of this model cannot be shared, so none is kept for sessions"
                raise InvalidRequestError(f"X-Session-ID: {session_id!r} is not allowed: {why}", param="X-Session-ID")
            if resume_ids is not None:
                self._admission.check_resumed(resume_ids, params, limit - len(prompt_ids))
        except WeftError:
            self.meters.note_rejection("invalid")
            raise
        complete = resume_ids is not None and len(resume_ids) == limit - len(prompt_ids)
        if not complete:
            self._make_place(priority)
        now = self._clock.now_s()
        request = Request(
            request_id,
            prompt_ids,
            params,
            max_device_len=limit,
            seed=params.seed % _U64 if params.seed is not None else mix(self._seed, request_id),
            eos_token_ids=self._eos_token_ids,
            arrival_s=now if arrival_s is None else arrival_s,
            priority=priority,
            deadline_s=deadline_s,
            session_id=session_id,
            session_ttl_s=session_ttl_s,
            adapter=adapter,
            key_offset=adapter * self.vocab_size,
            resume_ids=resume_ids,
            media=media,
        )
        if session_id is not None:
            self.cache.renew_lease(session_id, now, self._ttl_s(request))
        if complete:
            self._end_complete(request, FinishReason.LENGTH)
            return request
        self.queued.add(request)
        self._fill_running_set()
        return request

    def abort(self, request_id: int, since_s: float | None = None) -> bool:
        """Cancels a request at any stage; False if there is none (any more).

        `since_s` is when its client was known to be gone (now, if it is not given); see `Meters.abort_latency`.
        """
        request = self.find(request_id)
        if request is None:
            return False
        self._aborted_s[request_id] = self._clock.now_s() if since_s is None else since_s
        self._end(request, Ending(RequestState.CANCELLED, error=CancelledError("the request was cancelled")))
        return True

    def complete(self, request_id: int) -> bool:
        """Ends a request whose text is complete (a stop string was found); False if there is none (any more)."""
        request = self.find(request_id)
        if request is None:
            return False
        if request.output_len == 0:
            raise InvariantError(f"{request!r} cannot be complete, it has not run")
        self._end_complete(request, FinishReason.STOP)
        return True

    def end_session(self, session_id: str) -> tuple[bool, int]:
        """Gives up a session's lease and cancels its requests; whether there was a lease, and how many requests."""
        members = [r for r in (*self.live, *self.leaving.values()) if r.session_id == session_id]
        aborted = 0
        for request in members:
            request.session_id = None  # its release must not open the session again
            aborted += self.abort(request.request_id)
        return self.cache.end_lease(session_id), aborted

    def expire(self) -> None:
        """Ends what has waited or run too long, and keeps the cache below its threshold; to be called on a timer."""
        now = self._clock.now_s()
        for request in self.live:
            self._end_if_overdue(request, now)
        self.cache.expire_leases(now)
        if now >= self._next_cleanup_s:
            self.cache.trim()
            self._next_cleanup_s = now + self.limits.cleanup_interval_s

    def take_updates(self) -> list[Update]:
        """What happened since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    def find(self, request_id: int) -> Request | None:
        """A request that has not ended."""
        for container in (self.running, self.retracted, self.pending, self.queued):
            request = container.get(request_id)
            if request is not None:
                return request
        return None

    # ---- insides ----------------------------------------------------------------------------------------------

    def _make_place(self, priority: int) -> None:
        """A place in the queue for one more; raises QueueFullError where there is none."""
        if len(self.queued) < self.limits.max_queue_size or self._places > 0:
            return
        worst = self.queued.worst()
        if self.limits.priority and priority < worst.priority:
            error = DisplacedError("the queue is full, and a request of higher priority took the place of this one")
            self.meters.rejections["displaced"] += 1
            self._end(worst, Ending(RequestState.REJECTED, error=error))
            return
        self.meters.note_rejection("queue_full")
        raise QueueFullError(
            f"the waiting queue is full ({self.limits.max_queue_size} requests)", retry_after_s=self.retry_after_s
        )

    @property
    def _places(self) -> int:
        """Free places in the running set."""
        return self.limits.max_concurrent_requests - self.num_pending - len(self.running)

    def _fill_running_set(self) -> None:
        places = self._places
        if places <= 0 or not self.queued:
            return
        now = self._clock.now_s()
        for request in self.queued.ordered():
            if self._end_if_overdue(request, now):
                continue
            self.queued.take(request)
            request.admit(now)
            self.pending.add(request)
            places -= 1
            if not places:
                return

    def _end_if_overdue(self, request: Request, now: float) -> bool:
        least_s = self.speed.least_seconds(request.device_len) if request.row < 0 else 0.0
        if overdue(request, now, self.limits, least_s) is None:
            return False
        if least_s and reuses_cache(request):  # it did not look so good; but what is cached need not be computed
            cached = self.cache.peek(request.keys(0, request.device_len))
            least_s = self.speed.least_seconds(request.device_len - cached)
        message = overdue(request, now, self.limits, least_s)
        if message is None:
            return False
        self._end(request, Ending(RequestState.TIMEOUT, error=DeadlineError(message)))
        return True

    def _end_complete(self, request: Request, reason: FinishReason) -> None:
        """What it gave is all that was wanted, wherever it stands: it may be retracted, or resumed and not begun."""
        now = self._clock.now_s()
        if request.state is RequestState.QUEUED:
            request.admit(now)
        if request.state is RequestState.PENDING:
            request.schedule(now)
        self._end(request, Ending(RequestState.COMPLETED, reason))

    def _end_failed(self, request: Request, message: str) -> None:
        """Its computation failed; its new KV is worth nothing, nor is what it began with from the second tier."""
        self.cache.distrust(request)
        self._end(request, Ending(RequestState.FAILED, error=EngineError(message)), keep=False)

    def _end(self, request: Request, ending: Ending, update: Update | None = None, *, keep: bool = True) -> None:
        """The one place where a request ends: state, containers, counters, its last update."""
        request_id = request.request_id
        request.finish(ending, self._clock.now_s())
        if request.first_scheduled_s is not None:
            self.speed.note_ending(request.output_len)
        for line in (self.queued, self.pending):
            if request_id in line:
                line.remove(request)
        self.running.pop(request_id, None)
        self.retracted.pop(request_id, None)
        if self._chunked is request:
            self._chunked = None
        self.meters.finished[ending.state.value] += 1
        update = update if update is not None else Update(request)
        update.ending = ending
        self._updates.append(update)
        if not keep:
            self._worthless[request_id] = None
        if request.in_flight:
            self.leaving[request_id] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Gives back KV, then the row; what was computed stays in the tree, under the session's lease if it has one."""
        keep = request.request_id not in self._worthless and not request.params.embed
        self._worthless.pop(request.request_id, None)
        self.cache.cache_finished(request, keep=keep)
        now = self._clock.now_s()
        if request.session_id is not None:
            if request.first_scheduled_s is None or not request.cached_len:
                self.cache.renew_lease(request.session_id, now, self._ttl_s(request))
            else:
                keys = request.keys(0, request.cached_len)
                self.cache.lease(request.session_id, keys, now, self._ttl_s(request))
        since_s = self._aborted_s.pop(request.request_id, None)
        if since_s is not None:
            self.meters.abort_latency.observe(max(0.0, now - since_s))

    def _ttl_s(self, request: Request) -> float:
        return self.limits.session_ttl_s if request.session_ttl_s is None else request.session_ttl_s

    def _check_states(self) -> None:
        for container, state in (
            (self.queued, RequestState.QUEUED),
            (self.pending, RequestState.PENDING),
            (self.retracted, RequestState.PENDING),
            (self.running, RequestState.PROCESSING),
        ):
            for request in container.values():
                if request.state is not state:
                    raise InvariantError(f"{request!r} is kept among the {state.value}")
                if (request.row >= 0) != (state is RequestState.PROCESSING):
                    raise InvariantError(f"{request!r} has table row {request.row}")
        for request in self.leaving.values():
            if not request.state.terminal or not request.in_flight or request.row < 0:
                raise InvariantError(f"{request!r} has no reason to be kept")
