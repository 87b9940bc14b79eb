"""What every backend needs to run steps that were planned ahead, and to break one off."""

from __future__ import annotations

import threading

import numpy as np

from weft.core.plan import IN_FLIGHT, Int32s, StepPlan


class StepCancelled(Exception):
    """A step was broken off because nobody wants its result; its KV is not written, or not whole."""


class TokenPool:
    """The last sampled token of every table row: what `IN_FLIGHT` stands for in the plan of the next step.

    One token a row is enough, since at most one step is planned ahead, and a row changes hands only when no step with
    its old owner is in flight.
    """

    def __init__(self) -> None:
        self._last: Int32s = np.zeros(64, dtype=np.int32)

    def resolve(self, plan: StepPlan) -> None:
        """Fills the tokens in that were not known when the step was planned."""
        places = np.flatnonzero(plan.token_ids == IN_FLIGHT)
        if not len(places):
            return
        rows = np.repeat(plan.table_rows, plan.extend_lens)[places]
        plan.token_ids[places] = self._last[rows]
        for sampling in plan.sampling:
            output = sampling.output_ids
            if output is not None and len(output) and output[-1] == IN_FLIGHT:
                output[-1] = self._last[plan.table_rows[sampling.row]]

    def store(self, plan: StepPlan, tokens: Int32s) -> None:
        """Keeps what the step sampled; `tokens` is `StepResult.tokens`."""
        top = int(plan.table_rows.max())
        if top >= len(self._last):
            grown = np.zeros(2 * (top + 1), dtype=np.int32)
            grown[: len(self._last)] = self._last
            self._last = grown
        # A row without a token has failed or goes on with its prompt; a step planned ahead for it needs a valid id.
        self._last[plan.table_rows] = np.maximum(tokens, 0)


class Cancellation:
    """Which steps are to be broken off. `cancel` may be called from any thread, before or while the step runs."""

    def __init__(self) -> None:
        self._step = -1
        self._event = threading.Event()

    def cancel(self, step: int) -> None:
        """Steps up to this one are to stop."""
        self._step = max(self._step, step)
        self._event.set()

    def check(self, step: int) -> None:
        """Raises StepCancelled when this step is to stop."""
        if step <= self._step:
            raise StepCancelled(f"step {step} was broken off")

    def sleep(self, step: int, seconds: float) -> None:
        """Sleeps as part of a step. Raises StepCancelled as soon as it is to stop."""
        self._event.clear()
        self.check(step)
        if self._event.wait(seconds):
            self.check(step)
