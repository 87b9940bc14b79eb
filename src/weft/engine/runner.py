"""`StepRunner`: a thread that computes steps in order, so that the engine's loop stays awake meanwhile.

The model is loaded in this thread too (`call`). libgomp gives every thread that has run a parallel section workers of
its own, and once all of them together outnumber the processors, none of them spins: prefill then takes twice as long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from weft.backends.base import Backend
from weft.core.plan import StepPlan, StepResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Landing:
    """A step that is over: its result, or the exception that it ended with; and how long it took."""

    plan: StepPlan
    outcome: StepResult | Exception
    seconds: float


def run_step(backend: Backend, plan: StepPlan) -> Landing:
    """Computes a step here and now."""
    start_s = time.monotonic()
    outcome: StepResult | Exception
    try:
        outcome = backend.forward(plan)
    except Exception as error:
        outcome = error
    return Landing(plan, outcome, time.monotonic() - start_s)


class StepRunner:
    """See the module's docstring.

    Args:
        backend: loaded; nobody else calls its `forward`.
        make_wake: called in the thread; returns what the thread calls after each step.
    """

    def __init__(self, backend: Backend, make_wake: Callable[[], Callable[[], None]]) -> None:
        self._backend = backend
        self._make_wake = make_wake
        self._jobs: queue.SimpleQueue[StepPlan | Callable[[], None]] = queue.SimpleQueue()
        self._landings: queue.SimpleQueue[Landing] = queue.SimpleQueue()
        self._in_flight: dict[int, StepPlan] = {}
        self._since_s = 0.0
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    @property
    def in_flight(self) -> list[StepPlan]:
        """Steps that were started and not taken back, the oldest first."""
        return list(self._in_flight.values())

    def busy_s(self) -> float:
        """How long the present step has been running, seen from here; 0 when there is none."""
        return time.monotonic() - self._since_s if self._in_flight else 0.0

    def start(self, plan: StepPlan) -> None:
        if not self._in_flight:
            self._since_s = time.monotonic()
        self._in_flight[plan.step] = plan
        self._jobs.put(plan)

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, in the thread of the steps."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future.result()

    def take(self) -> list[Landing]:
        """The steps that have ended since the last call, in order."""
        landings = []
        while not self._landings.empty():
            landing = self._landings.get()
            del self._in_flight[landing.plan.step]
            landings.append(landing)
            self._since_s = time.monotonic()
        return landings

    def _run(self) -> None:
        wake = self._make_wake()
        while True:
            job = self._jobs.get()
            if isinstance(job, StepPlan):
                self._landings.put(run_step(self._backend, job))
                wake()
            else:
                job()
