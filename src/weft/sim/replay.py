"""Does a recorded run again: the same inputs at the same times into a fresh scheduler and cache.

Every decision is compared with the recorded one, and all invariants are proven after every step.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weft.core.errors import WeftError
from weft.core.plan import StepPlan, StepResult, TokenLogprobs
from weft.core.request import Request
from weft.engine import trace
from weft.scheduler.scheduler import Update
from weft.sim.driver import Driver
from weft.sim.measure import Measure


class Diverged(Exception):
    """The scheduler decided otherwise than in the trace."""


class Replay:
    """See the module's docstring.

    Args:
        path: a trace. Raises TraceError where it is none.

    Attributes:
        driver: the scheduler. measure: what the run was like. events: how many were replayed.
        start_s: time of the first one.
        torn: whether the trace's last line was cut short.
    """

    def __init__(self, path: Path) -> None:
        self._file = trace.TraceFile(path)
        self.header = self._file.header
        self.driver = Driver(self.header)
        self.measure = Measure()
        self.events = 0
        self.start_s = 0.0
        self._flights: dict[int, StepPlan] = {}
        self._refusal: tuple[int, WeftError] | None = None
        self._endings: deque[trace.End] = deque()

    @property
    def torn(self) -> bool:
        return self._file.torn

    def execute(self) -> None:
        """Replays all of it. Raises Diverged at the first difference, TraceError for a damaged trace."""
        for event in self._file:
            self.driver.clock.time_s = event.t
            self.events += 1
            if self.events == 1:
                self.start_s = event.t
            try:
                self._replay(event)
            except (WeftError, Diverged):
                raise
            except Exception as error:
                raise Diverged(f"{self._place(event)}: {type(error).__name__}: {error}") from error
            self._deliver()
        if self._endings and not self.torn:
            raise Diverged(f"at the end: {_show(self._endings[0])}, which the trace does not have")

    def _replay(self, event: trace.Event) -> None:
        driver = self.driver
        if self._refusal is not None and not isinstance(event, trace.Refused):
            request_id, error = self._refusal
            raise Diverged(f"{self._place(event)}: request {request_id} was refused ({error}); in the trace it was not")
        match event:
            case trace.Add():
                self._add(event)
            case trace.Refused():
                self._compare_refusal(event)
            case trace.Abort():
                driver.abort(event.id, event.since)
            case trace.Complete():
                driver.complete(event.id)
            case trace.Expire():
                driver.expire()
            case trace.Flush():
                driver.flush()
            case trace.Reset():
                driver.reset()
            case trace.EndSession():
                driver.end_session(event.session)
            case trace.Plan():
                self._plan(event)
            case trace.End():
                self._compare(event, self._endings.popleft() if self._endings else None, "ending")
            case _:
                self._land(event)

    def _add(self, event: trace.Add) -> None:
        outcome = self.driver.add(
            event.id,
            event.prompt_ids(),
            event.sampling(),
            priority=event.priority,
            arrival_s=event.arrival,
            deadline_s=event.deadline,
            session_id=event.session,
            session_ttl_s=event.ttl,
            adapter=event.adapter,
            resume_ids=event.resume_ids(),
            media=event.spans(),
        )
        if not isinstance(outcome, Request):
            self._refusal = (event.id, outcome)

    def _compare_refusal(self, event: trace.Refused) -> None:
        if self._refusal is None or self._refusal[0] != event.id:
            what = f"request {event.id} was taken; in the trace it was refused ({event.code})"
            raise Diverged(f"{self._place(event)}: {what}")
        self._compare(event, trace.Refused(t=event.t, id=event.id, code=self._refusal[1].code), "refusal")
        self.measure.note_refusal(event.code)
        self._refusal = None

    def _plan(self, event: trace.Plan) -> None:
        plan = self.driver.plan()
        self._compare(event, trace.plan_event(event.t, plan), "plan")
        if plan is not None:
            self._flights[plan.step] = plan

    def _land(self, event: trace.Apply | trace.Fail | trace.Cancelled) -> None:
        plan = self._flights.pop(event.step, None)
        if plan is None:
            raise Diverged(f"{self._place(event)}: step {event.step} was not planned")
        if isinstance(event, trace.Apply):
            self.driver.apply(plan, _result(event, plan))
        elif isinstance(event, trace.Fail):
            self.driver.fail(plan, event.message)
        else:
            self.driver.cancelled(plan)
        self.driver.scheduler.check()
        self.measure.note_step(event.t - self.start_s, self.driver.scheduler, plan)

    def _deliver(self) -> None:
        updates: list[Update] = self.driver.take_updates()
        now = self.driver.now_s
        for update in updates:
            self.measure.note_tokens(now, [update.request.request_id] * len(update.tokens))
            if update.ending is not None:
                self.measure.note_ending(update)
                self._endings.append(trace.end_event(now, update))

    def _compare(self, recorded: msgspec.Struct, replayed: msgspec.Struct | None, what: str) -> None:
        if replayed is None:
            raise Diverged(f"{self._place(recorded)}: no such {what}; in the trace: {_show(recorded)}")
        # The engine may hand endings out a little later than they came about; when, is not the scheduler's decision.
        was, now = _fields(recorded), _fields(replayed)
        if was != now:
            different = [f"{k}: {_short(was[k])} in the trace, {_short(now[k])} now" for k in was if was[k] != now[k]]
            raise Diverged(f"{self._place(recorded)}: another {what}; {'; '.join(different)}")

    def _place(self, event: Any) -> str:
        return f"step {self.driver.scheduler.steps}, event {self.events}, {event.t:.6f} s"


def _result(event: trace.Apply, plan: StepPlan) -> StepResult:
    """The recorded result; the values of log probabilities change nothing, but whether a prompt's are there does."""
    blank = TokenLogprobs(0, 0.0)
    return StepResult(
        np.array(event.tokens, dtype=np.int32),
        errors=event.errors,
        prompt_logprobs={row: [blank] * len(wanted.targets) for row, wanted in plan.prompt_logprobs.items()},
    )


def _fields(event: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(event).items() if name != "t"}


def _show(event: msgspec.Struct) -> str:
    return _short(msgspec.json.encode(event).decode())


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."
