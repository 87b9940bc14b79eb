"""`Scheduler`: the roster of requests, and the steps that they go through.

`plan()` decides, a backend computes, `apply(plan, result)` records. Steps may overlap: the next one may be planned
before the one before has landed; it then goes by what that one will have done (`Request.planned_len`,
`Request.expected_len`). Updates (tokens and endings) collect in `take_updates()`.

Invariant: a step's result is recorded from its plan and the result alone; what has become of its requests meanwhile
only decides whether they still want it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.core.clock import Clock
from weft.core.errors import InvariantError
from weft.core.plan import Float32s, StepMode, StepPlan, StepResult, TokenLogprobs
from weft.core.request import Ending, FinishReason, Request, RequestState
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.adapters import AdapterTurns
from weft.scheduler.limits import Limits
from weft.scheduler.planner import Row, build_plan
from weft.scheduler.prefill import PrefillAdder, Verdict
from weft.scheduler.reserve import NewTokenRatio
from weft.scheduler.roster import Roster, Update

__all__ = ["Scheduler", "Update"]

MIN_UNWANTED_TOKENS = 64
"""A step that others want is not broken off for fewer tokens that nobody does."""


@dataclass(slots=True)
class _Flight:
    """A step between `plan` and its landing; `undone`: requests whose rows build on a step that was broken off."""

    rows: list[Row]
    planned_s: float
    prompt_tokens: int
    undone: dict[int, None] = field(default_factory=dict)


class Scheduler(Roster):
    """See the module's docstring.

    Args:
        limits: resolved limits.
        cache: the KV cache, with at least `limits.max_batch_size` rows.
        clock: time of arrivals and deadlines.
        max_context_tokens: longest sequence of the model.
        vocab_size: token ids are below it.
        eos_token_ids: end tokens of the model.
        seed: requests without a seed of their own draw theirs from this one and their id.
        adapters: LoRA adapters that requests may ask for, by number from 1 on.
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
        super().__init__(
            limits,
            cache,
            clock,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            seed=seed,
            adapters=adapters,
        )
        self.steps = 0
        self._ratio = NewTokenRatio()
        self._turns = AdapterTurns(adapters)
        self._flights: dict[int, _Flight] = {}
        self._landed_s = 0.0

    # ---- one step ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decides the next step; None when nothing can run before a step in flight has landed."""
        while True:
            self._fill_running_set()
            decoding = self._decoding()
            if not self._has_room(decoding):
                if self._flights:
                    return None
                self._yield_room()
                continue
            for adapter in self._turns.order(self.running.values(), self.retracted.values(), self.pending.values()):
                prompts, riding, mode = self._choose(adapter, decoding)
                if prompts or riding:
                    return self._depart(prompts, riding, mode)
            if self.queued and self._places > 0:
                continue  # somebody's time ran out just now, and left a place
            if self._flights or not (self.running or self.num_pending):
                return None
            self._yield_room()

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Records what a step gave. Reads the plan and the result, not what has become of the requests since."""
        now = self._clock.now_s()
        flight = self._land(plan)
        seconds = now - max(flight.planned_s, self._landed_s)
        self.speed.note_step(plan.mode, plan.num_tokens, seconds, flight.prompt_tokens)
        self._landed_s = now
        self._ratio.note_step()
        emits, tokens = plan.emits.tolist(), result.tokens.tolist()
        for index, (request, count) in enumerate(flight.rows):
            if request.request_id in flight.undone:
                self._undo(request, count, emits=emits[index])
                continue
            request.land(emits=emits[index])
            error = result.errors.get(index)
            if request.state.terminal:
                if error is not None:
                    self._worthless[request.request_id] = None
                self._land_leaving(request, count)
                continue
            if error is None and emits[index] and not 0 <= tokens[index] < self.vocab_size:
                error = f"the engine chose token {tokens[index]}, which is not in the vocabulary"
            if error is not None:
                self._end_failed(request, error)
                continue
            start = request.cached_len
            request.advance(count)
            if request.params.embed:
                self._record_embedding(request, result.embeddings.get(index))
                continue
            prompt_logprobs = result.prompt_logprobs.get(index)
            if prompt_logprobs is not None:
                prompt_logprobs = prompt_logprobs[request.prompt_logprobs_len - (start + 1) :]  # some were told before
                request.prompt_logprobs_len += len(prompt_logprobs)
            if count > 1 or not request.output_len:
                self.cache.cache_unfinished(request)
            if emits[index]:
                self._record_token(request, tokens[index], result.logprobs.get(index), prompt_logprobs)
            elif prompt_logprobs:
                self._updates.append(Update(request, prompt_logprobs=prompt_logprobs))

    def fail(self, plan: StepPlan, message: str) -> None:
        """The whole step failed: its requests end, the others go on."""
        flight = self._land(plan)
        for index, (request, _) in enumerate(flight.rows):
            request.land(emits=bool(plan.emits[index]))
            if request.state.terminal:
                self._worthless[request.request_id] = None  # nor is what a later step computes on top of it
                self._land_leaving(request, 0)
            else:
                self._end_failed(request, message)

    def cancelled(self, plan: StepPlan) -> None:
        """The step was broken off (see `abandoned`): whoever in it has not ended takes that step again."""
        flight = self._land(plan)
        undone = dict.fromkeys(request.request_id for request, _ in flight.rows)
        for later in self._flights.values():
            later.undone.update((request.request_id, None) for request, _ in later.rows if request.request_id in undone)
        for index, (request, count) in enumerate(flight.rows):
            self._undo(request, count, emits=bool(plan.emits[index]))

    def abandoned(self, plan: StepPlan) -> bool:
        """Whether a step in flight had better be broken off: nobody wants its result any more, or most of what it
        computes is somebody's long prompt that nobody wants, and the others start again sooner than they wait."""
        flight = self._flights.get(plan.step)
        if flight is None:
            return False
        unwanted = sum(count for request, count in flight.rows if request.state.terminal)
        if not self.cache.shares:  # nor can a step be done again on a state that it has changed
            return unwanted == plan.num_tokens
        return unwanted == plan.num_tokens or unwanted >= max(MIN_UNWANTED_TOKENS, plan.num_tokens / 2)

    def check(self) -> None:
        """Proves all invariants; raises InvariantError."""
        self.cache.check([*self.running.values(), *self.leaving.values()])
        self._check_states()
        in_steps: dict[int, int] = {}
        for flight in self._flights.values():
            for request, _ in flight.rows:
                in_steps[request.request_id] = in_steps.get(request.request_id, 0) + 1
        for request in (*self.live, *self.leaving.values()):
            if request.in_flight != in_steps.pop(request.request_id, 0):
                raise InvariantError(f"{request!r} counts {request.in_flight} steps in flight")
        if in_steps:
            raise InvariantError(f"requests {list(in_steps)} are in flight, but nobody keeps them")
        if len(self.running) + len(self.leaving) > self.limits.max_batch_size:
            raise InvariantError(f"{len(self.running)} running, limit {self.limits.max_batch_size}")
        if len(self.running) + self.num_pending > self.limits.max_concurrent_requests:
            raise InvariantError(f"running set of {len(self.running) + self.num_pending}")
        if len(self.queued) > self.limits.max_queue_size:
            raise InvariantError(f"{len(self.queued)} queued, limit {self.limits.max_queue_size}")

    # ---- insides: the next step -------------------------------------------------------------------------------

    def _decoding(self) -> list[Request]:
        """Those in the batch whose next step is one token, as far as is known now."""
        chunked, stale = self._chunked, self._stale
        return [
            r
            for r in self.running.values()
            if r is not chunked and r.device_len + r.tokens_in_flight < r.max_device_len and r.request_id not in stale
        ]

    @property
    def _stale(self) -> dict[int, None]:
        """Requests in a step that builds on one that was broken off; they wait until it has landed."""
        return {request_id: None for flight in self._flights.values() for request_id in flight.undone}

    def _has_room(self, decoding: list[Request]) -> bool:
        available = self.cache.available
        if available >= len(decoding) * self.cache.page_size:
            return True
        return sum(self.cache.room_needed(r, r.planned_len + 1) for r in decoding) <= available

    def _choose(self, adapter: int, decoding: list[Request]) -> tuple[list[Row], list[Request], StepMode]:
        """Whose prompts the adapter's next step computes, who decodes in it, and its mode.

        `decoding` are those of all adapters: whatever the step takes, it leaves room for them and does not stall them.
        """
        riding = self._turns.of(decoding, adapter)
        in_turn = not self.limits.mixed and riding and self._turns.last_mode(adapter) == "extend"
        prompts = [] if in_turn else self._prompts(adapter, decoding)
        if not prompts:
            return [], riding, "decode"
        if riding and self.limits.mixed:
            return prompts, riding, "mixed"
        return prompts, [], "extend"

    def _prompts(self, adapter: int, decoding: list[Request]) -> list[Row]:
        if self._chunked is None and not self.num_pending:
            return []
        now = self._clock.now_s()
        stall_s = self.limits.max_decode_stall_s
        adder = PrefillAdder(
            self.cache,
            self.limits,
            self._ratio,
            list(self.running.values()),
            places=self.limits.max_batch_size - len(self.running) - len(self.leaving),
            decoding=decoding,
            alone=not self.running and not self.leaving,
            now_s=now,
            stall_tokens=self.speed.prompt_tokens_in(stall_s) if stall_s is not None else None,
        )
        if self._chunked is not None:
            may_go_on = self._chunked.adapter == adapter and self._chunked.request_id not in self._stale
            adder.continue_chunked(self._chunked, may_go_on=may_go_on)
        passed: dict[int, None] = {}
        for line in (list(self.retracted.values()), self.pending.ordered()):
            if adder.full or not self._add_from(line, adder, adapter, passed, now):
                break
        self._start(adder, now)
        return adder.taken

    def _add_from(
        self, line: Iterable[Request], adder: PrefillAdder, adapter: int, passed: dict[int, None], now: float
    ) -> bool:
        """Tries everybody in line that has this adapter; False once nobody else fits.

        Room is left for the first one of each other adapter that is passed over, so that its turn is worth something.
        """
        for request in line:
            if request.adapter != adapter:
                if request.adapter not in passed:
                    passed[request.adapter] = None
                    adder.keep_room(request)
            elif not self._end_if_overdue(request, now) and adder.add(request) is Verdict.STOP:
                return False
        return True

    def _start(self, adder: PrefillAdder, now: float) -> None:
        """Moves what the adder took into the batch."""
        for request, _ in adder.taken:
            request.chunks += 1
            if request.state is not RequestState.PENDING:
                continue
            if self.retracted.pop(request.request_id, None) is None:
                self.pending.take(request)
            request.schedule(now)
            self.running[request.request_id] = request
            if not request.retractions:
                request.reused_tokens = min(request.cached_len, request.input_len)
                self.meters.note_first_batch(request, now)
        self._chunked = adder.chunked

    def _depart(self, prompts: list[Row], decoding: list[Request], mode: StepMode) -> StepPlan:
        now = self._clock.now_s()
        self.cache.demote()
        plan = build_plan(self.steps, mode, prompts, decoding, self.cache, now)
        rows = [*prompts, *((r, 1) for r in decoding)]
        self._flights[plan.step] = _Flight(rows, now, sum(count for _, count in prompts))
        self._turns.note(plan.adapter, plan.step, mode)
        self.steps += 1
        return plan

    def _yield_room(self) -> None:
        """Nothing fits and nothing is in flight: somebody has to give way.

        The victim is the one of lowest priority, among equals the last to come: so the first to come always goes on,
        and no two requests can push each other out in turn. Before a lone request has to end, sessions lose their KV.
        """
        if len(self.running) > 1:
            self._retract(max(self.running.values(), key=self._rank))
        elif not self.cache.yield_lease():
            request = next(iter(self.running.values()), None) or self.waiting_in_set[0]
            if request.output_len:
                if request.state is RequestState.PENDING:
                    request.schedule(self._clock.now_s())
                self._end(request, Ending(RequestState.COMPLETED, FinishReason.LENGTH))
            else:
                self._end_failed(request, f"the KV cache of {self.cache.capacity} tokens has no room for this request")

    def _rank(self, request: Request) -> tuple[int, float, int]:
        return (request.priority if self.limits.priority else 0, request.arrival_s, request.request_id)

    def _retract(self, request: Request) -> None:
        """Takes a request out of the batch; what it computed stays in the cache for as long as there is room."""
        self._ratio.note_retraction(self.running.values())
        self._send_back(request)
        self.meters.retractions += 1

    def _send_back(self, request: Request) -> None:
        """From the batch to the front of the line."""
        del self.running[request.request_id]
        if self._chunked is request:
            self._chunked = None
        self.cache.cache_finished(request)
        request.retract(self._clock.now_s())
        self.retracted[request.request_id] = request
        self.retracted = dict(sorted(self.retracted.items(), key=lambda item: self._rank(item[1])))

    # ---- insides: results and endings -------------------------------------------------------------------------

    def _land(self, plan: StepPlan) -> _Flight:
        if next(iter(self._flights), plan.step) != plan.step:
            raise InvariantError(f"step {plan.step} landed before step {next(iter(self._flights))}")
        return self._flights.pop(plan.step)

    def _record_token(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, prompt_logprobs: list[TokenLogprobs] | None
    ) -> None:
        self._note_prefilled(request)
        ending = request.append(token)
        self.meters.generation_tokens += 1
        update = Update(request, [token], None if logprobs is None else [logprobs], prompt_logprobs)
        if ending is not None:
            self._end(request, ending, update)
        else:
            self._updates.append(update)

    def _record_embedding(self, request: Request, embedding: Float32s | None) -> None:
        """The prompt was all; a replayed step has no vector to give."""
        self._note_prefilled(request)
        self._end(request, Ending(RequestState.COMPLETED, FinishReason.STOP), Update(request, embedding=embedding))

    def _note_prefilled(self, request: Request) -> None:
        if request.first_token_s is None:
            request.first_token_s = self._clock.now_s()
            self.meters.note_first_token(request)

    def _undo(self, request: Request, count: int, *, emits: bool) -> None:
        """A row that was not computed. A prompt that was not being cut goes back to the front of the line."""
        request.undo(count, emits=emits)
        if not self.cache.shares:
            self._worthless[request.request_id] = None  # a state that a broken-off step may have changed
        if request.state.terminal:
            self._land_leaving(request, 0)
        elif request.in_flight or request is self._chunked:
            return
        elif request.extend_len > 1 or request.params.embed:  # others decode their one token
            self._send_back(request)

    def _land_leaving(self, request: Request, count: int) -> None:
        """A step with a request that has ended meanwhile; its KV is good if the tokens it belongs to are known."""
        if request.request_id not in self._worthless and request.cached_len + count <= request.device_len:
            request.advance(count)
        elif not self.cache.shares:
            self._worthless[request.request_id] = None  # its state is beyond what is known
        if not request.in_flight:
            del self.leaving[request.request_id]
            self._release(request)
