"""Two systems, one with plain steps and one with overlapping ones, get the same operations.

Hypothesis chooses them, and shrinks what it finds to the shortest sequence.

Steps stay in flight between two rules, so that everything else may happen while they run. Each system is checked by
its walk after every operation: all invariants, and every token against the fake model alone. Against each other: what
one of them says of a request is the beginning of what the other says, and of those that both completed the outputs and
the reasons are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.property.walk import POLICIES, VOCAB, Shape, Walk
from weft.core.request import RequestState
from weft.core.sampling import SamplingParams
from weft.scheduler.limits import Limits

FAMILIES = np.random.default_rng(0).integers(1, VOCAB, size=(2, 64))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Systems in which everything is scarce."""
    concurrent = draw(st.integers(1, 5))
    limits = Limits(
        max_queue_size=draw(st.integers(1, 4)),
        max_concurrent_requests=concurrent,
        max_batch_size=draw(st.integers(1, concurrent)),
        max_prefill_tokens=draw(st.sampled_from([8, 40])),
        chunked_prefill_size=draw(st.sampled_from([None, 1, 8])),
        mixed=draw(st.booleans()),
        policy=draw(st.sampled_from(POLICIES)),
        priority=draw(st.booleans()),
        request_timeout_s=draw(st.sampled_from([None, 6.0])),
        queue_timeout_s=draw(st.sampled_from([None, 4.0])),
        session_ttl_s=2.0,
    )
    return Shape(
        capacity=draw(st.sampled_from([64, 128])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        max_context=64,
        retain=draw(st.sampled_from(["prefix", "none"])),
        limits=limits,
        ratio=draw(st.sampled_from([0.0, 0.7])),
        eviction_policy=draw(st.sampled_from(["lru", "lfu", "fifo"])),
        eviction_threshold=draw(st.sampled_from([1.0, 0.5])),
        adapters=draw(st.integers(0, 2)),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are the operations of a walk, done to both."""

    walks: tuple[Walk, Walk]

    @initialize(shape=shapes())
    def start(self, shape: Shape) -> None:
        plain, overlapped = Walk(shape), Walk(shape)
        overlapped.shape = Shape(**{**vars(shape), "depth": 2})
        self.walks = (plain, overlapped)

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 60),
        own=st.integers(0, 60),
        new=st.one_of(st.none(), st.integers(1, 4), st.just(50)),
        greedy=st.booleans(),
        logprobs=st.booleans(),
        priority=st.integers(0, 1),
        timeout_s=st.one_of(st.none(), st.just(3.0)),
        session=st.sampled_from([None, "a", "b"]),
        adapter=st.integers(0, 2),
    )
    def add(
        self,
        family: int,
        length: int,
        own: int,
        new: int | None,
        greedy: bool,
        logprobs: bool,
        priority: int,
        timeout_s: float | None,
        session: str | None,
        adapter: int,
    ) -> None:
        """A prompt that begins like its family's, and goes its own way at `own`."""
        number = max(walk.next_id for walk in self.walks)
        prompt = FAMILIES[family][:length].copy()
        prompt[own:] = 1 + number % (VOCAB - 1)
        params = SamplingParams(
            max_new_tokens=None if new is None else min(new, 64 - length),
            temperature=0.0 if greedy else 1.0,
            prompt_logprobs=0 if logprobs else None,
        )
        for walk in self.walks:
            walk.next_id = number
            own_adapter = min(adapter, walk.shape.adapters)
            walk.add(prompt, params, priority=priority, timeout_s=timeout_s, session=session, adapter=own_adapter)

    @precondition(lambda self: self.walks[0].next_id > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of anybody who was ever there."""
        request_id = data.draw(st.integers(1, self.walks[0].next_id - 1))
        self.both(lambda walk: walk.scheduler.abort(request_id))

    @precondition(lambda self: self.begun())
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Of somebody who has said something in both systems."""
        request_id = data.draw(st.sampled_from(self.begun()))
        self.told_to_stop[request_id] = None  # at a different token in each, perhaps
        self.both(lambda walk: walk.scheduler.complete(request_id))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def advance(self, seconds: float) -> None:
        self.both(lambda walk: walk.clock.advance(seconds))
        self.both(lambda walk: walk.scheduler.expire())

    @rule()
    def flush(self) -> None:
        self.both(lambda walk: walk.cache.flush())

    @rule(session=st.sampled_from(["a", "b"]))
    def end_session(self, session: str) -> None:
        self.both(lambda walk: walk.scheduler.end_session(session))

    @rule()
    def begin_step(self) -> None:
        for walk in self.walks:
            if len(walk.flights) < walk.shape.depth:
                work = walk.scheduler.has_work
                assert walk.begin_step() is not None or walk.flights or not work, "work waits but nothing can run"

    @rule(broken=st.sampled_from([False, False, False, True]), cancel=st.booleans())
    def end_step(self, broken: bool, cancel: bool) -> None:
        for walk in self.walks:
            if walk.flights:
                walk.end_step(broken=broken, cancel=cancel)

    @invariant()
    def one_is_the_beginning_of_the_other(self) -> None:
        if not hasattr(self, "walks"):
            return
        plain, overlapped = self.walks
        for request_id in plain.tokens.keys() & overlapped.tokens.keys():
            one, other = sorted((plain.tokens[request_id], overlapped.tokens[request_id]), key=len)
            assert other[: len(one)] == one
            completed = [walk.ended.get(request_id) is RequestState.COMPLETED for walk in self.walks]
            if all(completed) and request_id not in self.told_to_stop:
                assert one == other
                assert plain.requests[request_id].ending == overlapped.requests[request_id].ending

    def teardown(self) -> None:
        if hasattr(self, "walks"):
            for walk in self.walks:
                walk.drain()
            self.one_is_the_beginning_of_the_other()

    # ---- helpers ----------------------------------------------------------------------------------------------

    @property
    def told_to_stop(self) -> dict[int, None]:
        return self.__dict__.setdefault("_told_to_stop", {})

    def begun(self) -> list[int]:
        if not hasattr(self, "walks"):
            return []
        spoken = [{r.request_id for r in walk.scheduler.live if r.output_len} for walk in self.walks]
        return sorted(spoken[0] & spoken[1])

    def both(self, operation: Callable[[Walk], object]) -> None:
        for walk in self.walks:
            operation(walk)
            walk.settle()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40)
