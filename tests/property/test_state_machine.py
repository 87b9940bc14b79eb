"""The walk of walk.py driven by hypothesis, which shrinks what it finds to the shortest sequence of operations.

A step stays in flight between two rules, so that everything else may happen while it runs.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.property.walk import VOCAB, Shape, Walk
from weft.core.plan import StepPlan
from weft.core.sampling import SamplingParams
from weft.kv.pages import round_up
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
        policy=draw(st.sampled_from(["fcfs", "lpm"])),
        priority=draw(st.booleans()),
        request_timeout_s=draw(st.sampled_from([None, 6.0])),
        queue_timeout_s=draw(st.sampled_from([None, 4.0])),
    )
    page_size = draw(st.sampled_from([1, 4, 16]))
    return Shape(draw(st.sampled_from([64, 128])), page_size, max_context=64, retain=draw(retains), limits=limits)


retains = st.sampled_from(["prefix", "none"])


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are the operations of a walk; what must hold after each is checked by the walk and by `reservation`."""

    walk: Walk
    plan: StepPlan | None = None

    @initialize(shape=shapes())
    def start(self, shape: Shape) -> None:
        self.walk = Walk(shape)

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 60),
        own=st.integers(0, 60),
        new=st.one_of(st.none(), st.integers(1, 4)),
        greedy=st.booleans(),
        logprobs=st.booleans(),
        priority=st.integers(0, 1),
        timeout_s=st.one_of(st.none(), st.just(3.0)),
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
    ) -> None:
        """A prompt that begins like its family's, and goes its own way at `own`."""
        prompt = FAMILIES[family][:length].copy()
        prompt[own:] = 1 + len(self.walk.requests) % (VOCAB - 1)
        params = SamplingParams(
            max_new_tokens=new, temperature=0.0 if greedy else 1.0, prompt_logprobs=0 if logprobs else None
        )
        self.walk.add(prompt, params, priority=priority, timeout_s=timeout_s)

    @precondition(lambda self: self.walk.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Of anybody who was ever there."""
        self.walk.scheduler.abort(data.draw(st.integers(1, len(self.walk.requests))))
        self.walk.settle()

    @precondition(lambda self: self.walk.scheduler.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.walk.scheduler.complete(data.draw(st.sampled_from(sorted(self.walk.scheduler.running))))
        self.walk.settle()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def advance(self, seconds: float) -> None:
        self.walk.clock.advance(seconds)
        self.walk.scheduler.expire()
        self.walk.settle()

    @rule()
    def flush(self) -> None:
        self.walk.cache.flush()
        self.walk.settle()

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        work = self.walk.scheduler.has_work
        self.plan = self.walk.begin_step()
        assert (self.plan is not None) == work, "work is waiting but nothing can run"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end_step(self) -> None:
        assert self.plan is not None
        self.walk.end_step(self.plan)
        self.plan = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_step(self) -> None:
        assert self.plan is not None
        self.walk.end_step(self.plan, broken=True)
        self.plan = None

    @invariant()
    def reservation(self) -> None:
        """What running requests may still need is always there to be had."""
        if not hasattr(self, "walk"):
            return
        cache = self.walk.cache
        running = self.walk.scheduler.running.values()
        needed = sum(round_up(r.max_device_len, cache.page_size) - r.allocated_len for r in running)
        assert needed <= cache.available

    def teardown(self) -> None:
        if not hasattr(self, "walk"):
            return
        if self.plan is not None:
            self.walk.end_step(self.plan)
        self.walk.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40)
