"""`Simulation`: events on a virtual clock around the real scheduler, over a model that only costs time.

The loop is the engine's: whatever happens, happens at its own time, also while a step is in flight; a step that lands
is recorded and the next one begun in the same turn. With depth 2 a step is begun while the one before still runs.

Everything is decided by the seed: events with one time go in the order in which they were put off, and all containers
keep the order of insertion.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal

import numpy as np

from weft.core.plan import StepPlan, StepResult
from weft.engine.trace import Recorder
from weft.sim.clients import Clients
from weft.sim.driver import Driver
from weft.sim.measure import Measure
from weft.sim.model import HashModel
from weft.sim.options import Cost, Run
from weft.sim.system import System, shrunk, varied, varied_workload
from weft.sim.witness import Breach, Witness
from weft.sim.workload import Author

logger = logging.getLogger(__name__)

BREAK_OFF_S = 0.002
"""So long a step still takes once nobody wants it."""

MAX_FRUITLESS_STEPS = 5000
"""So many steps in a row without a token or an ending: somebody goes round in circles."""

Fate = Literal["ok", "crash", "bad row", "bad token", "cancelled"]


@dataclass(slots=True)
class _Flight:
    """A step between its plan and its landing; `bad_row` where its fate concerns one."""

    plan: StepPlan
    land_s: float
    fate: Fate
    bad_row: int


class SimulationFailed(Exception):
    """An invariant or a promise did not hold."""

    def __init__(self, seed: int, step: int, time_s: float, cause: Exception) -> None:
        super().__init__(f"seed {seed}, step {step}, {time_s:.6f} s: {type(cause).__name__}: {cause}")
        self.seed = seed
        self.step = step


class Simulation:
    """See the module's docstring.

    Args:
        run: seed, workload, faults.
        system: what serves; shrunk or varied as `run` says.
        recorder: makes a recorder for the system that it was in the end.

    Attributes:
        system: what serves. driver, measure, witness, clients: who take part.
        events: so many things happened. end_s: virtual time when the last of them had.
        evicted_tokens: till then.
    """

    def __init__(self, run: Run, system: System, record: Callable[[System], Recorder] | None = None) -> None:
        if run.vary:  # tiny pools among others
            system = varied(system, run.seed)
            run = replace(run, workload=varied_workload(run.workload, run.seed))
        elif run.faults.tiny_pool:
            system = shrunk(system, run.faults.tiny_pool)
        header = system.header
        self.run = run
        self.system = system
        self.events = 0
        self.end_s = 0.0
        self.evicted_tokens = 0
        self.recorder = record(system) if record is not None else None
        self.driver = Driver(header, self.recorder)
        self.measure = Measure()
        vocab = header.model.vocab_size
        late = None if run.faults.clock else system.tick_s
        self.witness = Witness(run.requests, vocab, header.limits, late)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        author = Author(
            run.workload,
            run.faults,
            run.cost,
            seed=run.seed,
            requests=run.requests,
            vocab=vocab,
            first_word=len(header.model.eos_token_ids),
            max_len=min(header.model.max_context_tokens, header.cache.capacity),
            batch=header.limits.max_batch_size,
            adapters=header.model.adapters,
        )
        self.clients = Clients(author, header, self.driver, self.witness, self.measure, self._at)
        self._model = HashModel(vocab, header.cache.capacity, header.cache.num_sequences, shares=header.cache.shares)
        self._rng = Random(f"steps {run.seed}")
        self._flights: list[_Flight] = []
        self._device_free_s = 0.0
        self._resume_s = 0.0
        self._fruitless = 0
        self._in_flight = np.zeros(header.cache.capacity, dtype=np.bool_)
        self._at(system.tick_s, self._tick)

    def execute(self) -> None:
        """Runs until everybody has gone home. Raises SimulationFailed."""
        scheduler = self.driver.scheduler
        try:
            while self._heap:
                time_s, _, happen = heapq.heappop(self._heap)
                self.driver.clock.time_s = max(time_s, self._resume_s)
                self.events += 1
                steps = self.measure.steps
                happen()
                self._deliver()
                self._break_off()
                self._begin()
                if self.measure.steps != steps or self.run.check == "event":
                    scheduler.check()
            self.end_s = self.driver.now_s
            self.evicted_tokens = scheduler.cache.evicted_total
            self._prove_empty()
        except Exception as error:
            raise SimulationFailed(self.run.seed, scheduler.steps, self.driver.now_s, error) from error
        finally:
            if self.recorder is not None:
                self.recorder.close()

    # ---- events -----------------------------------------------------------------------------------------------

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (time_s, self._serial, happen))

    def _tick(self) -> None:
        self.driver.expire()
        if self._heap or self.driver.scheduler.has_work:
            self._at(self.driver.now_s + self.system.tick_s, self._tick)

    def _deliver(self) -> None:
        updates = self.driver.take_updates()
        if updates:
            self._fruitless = 0
            self.clients.deliver(updates)

    # ---- steps ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Starts what can be started."""
        scheduler = self.driver.scheduler
        while len(self._flights) < self.system.header.depth and scheduler.has_work:
            plan = self.driver.plan()
            self._deliver()
            if plan is None:
                if scheduler.has_work and not self._flights:
                    raise Breach("work is waiting, but nothing can run")
                return
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        now = self.driver.now_s
        self._prove_apart(plan)
        fate, bad_row = self._draw_fate(plan)
        start_s = max(now + self.run.cost.host, self._device_free_s)
        land_s = self._device_free_s = start_s + step_seconds(self.run.cost, plan)
        flight = _Flight(plan, land_s, fate, bad_row)
        self._flights.append(flight)
        self._at(land_s, partial(self._land, flight, land_s))

    def _draw_fate(self, plan: StepPlan) -> tuple[Fate, int]:
        """What goes wrong with a step; the clock stands still on the way, if it does."""
        faults, draw = self.run.faults, self._rng.random
        crash, bad, which, pause, how_long = draw(), draw(), draw(), draw(), draw()
        if pause < faults.clock:
            self._resume_s = self.driver.now_s + (1.0 if how_long < 0.7 else 60.0)
        if crash < faults.crash:
            return "crash", 0
        if bad < faults.bad_row:
            return ("bad row" if how_long < 0.5 else "bad token"), int(which * plan.num_rows)
        return "ok", 0

    def _land(self, flight: _Flight, land_s: float) -> None:
        """A step is over; not, if it was broken off and has landed before."""
        if not self._flights or flight is not self._flights[0] or land_s != flight.land_s:
            return
        del self._flights[0]
        plan = flight.plan
        if flight.fate == "cancelled":
            self._model.skip(plan)
            self.driver.cancelled(plan)
        elif flight.fate == "crash":
            self._model.skip(plan)
            self.witness.broken.update(dict.fromkeys(plan.request_ids.tolist()))
            self.driver.fail(plan, "the simulated engine failed in this step")
        else:
            self.driver.apply(plan, self._compute(flight))
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS_STEPS:
            raise Breach(f"{self._fruitless} steps without a token or an ending")
        self._deliver()
        self.measure.note_step(self.driver.now_s, self.driver.scheduler, plan)
        if self._rng.random() < self.run.faults.flush:
            self.driver.flush()

    def _compute(self, flight: _Flight) -> StepResult:
        plan, row = flight.plan, flight.bad_row
        result = self._model.forward(plan)
        if flight.fate != "ok" and (flight.fate == "bad row" or plan.emits[row]):
            self.witness.broken[int(plan.request_ids[row])] = None
            if flight.fate == "bad row":
                result.errors[row] = "the logits are not finite"
            else:
                result.tokens[row] = self.system.header.model.vocab_size
        return result

    def _break_off(self) -> None:
        """Ends the step in flight early when nobody wants it any more."""
        if not self._flights:
            return
        flight = self._flights[0]
        if flight.fate == "cancelled" or not self.driver.scheduler.abandoned(flight.plan):
            return
        flight.fate = "cancelled"
        flight.land_s = min(flight.land_s, self.driver.now_s + BREAK_OFF_S)
        if len(self._flights) == 1:
            self._device_free_s = flight.land_s
        self._at(flight.land_s, partial(self._land, flight, flight.land_s))

    # ---- proofs -----------------------------------------------------------------------------------------------

    def _prove_apart(self, plan: StepPlan) -> None:
        """No step may write where one in flight writes."""
        for flight in self._flights:
            self._in_flight[flight.plan.slots] = True
            shared = self._in_flight[plan.slots].any()
            self._in_flight[flight.plan.slots] = False
            if shared:
                raise Breach(f"steps {flight.plan.step} and {plan.step} write to the same slot")

    def _prove_empty(self) -> None:
        """Everybody has gone: nothing may be held, and every count must come out."""
        scheduler, cache = self.driver.scheduler, self.driver.scheduler.cache
        if self.witness.open or scheduler.has_work or self._flights:
            raise Breach(f"requests {list(self.witness.open)[:8]} were accepted, but have not ended")
        if self.clients.sent != self.run.requests:
            raise Breach(f"{self.clients.sent} of {self.run.requests} requests were sent")
        scheduler.check()
        finished = sum(scheduler.meters.finished.values())
        if finished != self.run.requests:
            raise Breach(f"{finished} endings were counted for {self.run.requests} requests")
        if cache.counts().active or cache.rows.free_rows != self.system.header.cache.max_rows:
            raise Breach(f"KV is still held: {cache.counts()}")
        self.driver.stop_recording()
        self.driver.clock.time_s += 1e9  # past every lease
        self.driver.expire()
        self.driver.flush()
        if self._model.cells is not None:
            self._model.cells.do(cache.take_ops())
            if self._model.cells.used or self._model.cells.pieces:
                raise Breach(f"{self._model.cells.used} cells and {len(self._model.cells.pieces)} pieces are lost")
        if cache.pages.free_slots != cache.capacity or cache.sessions(self.driver.now_s):
            raise Breach(f"KV is still kept after every session has ended: {cache.counts()}")


def step_seconds(cost: Cost, plan: StepPlan) -> float:
    """How long a step takes."""
    singles = plan.num_rows if plan.mode == "decode" else int((plan.extend_lens == 1).sum())
    prompt_tokens = plan.num_tokens - singles
    context = int(plan.seq_lens.sum())
    return cost.step + cost.prompt_token * prompt_tokens + cost.decode_row * singles + cost.context_token * context
