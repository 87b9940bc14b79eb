"""Steps planned ahead on real backends: `begin` before the step before has been computed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import fake_settings
from weft.backends.base import Backend
from weft.backends.fake.backend import FakeBackend
from weft.backends.registry import BUNDLED_MODEL
from weft.backends.steps import StepCancelled, TokenPool
from weft.core.errors import ModelLoadError
from weft.core.plan import StepPlan, StepResult
from weft.core.sampling import SamplingParams
from weft.engine.core import EngineCore
from weft.engine.runner import StepRunner, run_step
from weft.ipc.messages import End, Submit


class Pump:
    """An `EngineCore` whose steps are computed as late as its depth allows."""

    def __init__(self, backend: Backend, *sets: str) -> None:
        self.core = EngineCore(fake_settings("kv_cache.max_items=2048", *sets), backend)
        self.core.load()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}
        self.flights: list[StepPlan] = []

    def submit(self, request_id: int, prompt: list[int], **params: Any) -> None:
        sampling = SamplingParams(**({"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params))
        self.core.submit(Submit(request_id, np.array(prompt, dtype=np.int32).tobytes(), sampling))

    def fill(self) -> None:
        while len(self.flights) < self.core.depth and (plan := self.core.begin()) is not None:
            self.flights.append(plan)

    def turn(self) -> None:
        self.core.tick()
        self.fill()
        if self.flights:
            self.core.land(run_step(self.core.backend, self.flights.pop(0)))
        self.take()

    def take(self) -> None:
        for output in self.core.take_outputs():
            assert output.request_id not in self.ends
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.end is not None:
                self.ends[output.request_id] = output.end
        self.core.scheduler.check()

    def run(self) -> None:
        while self.core.has_work:
            self.turn()


def run_all(backend: Backend, *sets: str) -> tuple[dict[int, list[int]], list[str | None]]:
    pump = Pump(backend, *sets)
    rng = np.random.default_rng(0)
    shared = rng.integers(10, 300, 40).tolist()
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"min_tokens": 4, "ignore_eos": False},
        {"max_new_tokens": 1},
        {"max_new_tokens": 40},
        {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.2},
    ]
    for number, kind in enumerate(kinds, start=1):
        pump.submit(number, shared[: 5 * number] + rng.integers(10, 300, 7).tolist(), **kind)
        pump.turn()
    pump.run()
    return pump.tokens, [pump.ends[k].finish_reason for k in sorted(pump.ends)]


class Penalised(FakeBackend):
    """Its tokens depend on the output so far, as penalties make them."""

    features = frozenset({"logprobs", "prompt_logprobs", "penalties"})

    def _sample(self, plan: StepPlan, sampling: Any) -> int:
        token = super()._sample(plan, sampling)
        if sampling.output_ids is not None and len(sampling.output_ids):
            assert (sampling.output_ids >= 0).all(), "a token in flight was not filled in"
            token = (token + int(sampling.output_ids.sum())) % 97
        return token


def test_the_fake_engine_gives_the_same_tokens() -> None:
    results = [
        run_all(Penalised(vocab_size=400, max_context_tokens=512), f"scheduler.overlap={overlap}", *more)
        for overlap in ("false", "true")
        for more in ((), ("scheduler.chunked_prefill_size=4",))
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("chunk", [5, 512])
def test_the_demo_model_gives_the_same_tokens(chunk: int) -> None:
    pytest.importorskip("torch", reason="needs the torch engine")
    from weft.backends.torch.backend import TorchBackend

    results = []
    for overlap in ("false", "true"):
        backend = TorchBackend(Path(BUNDLED_MODEL), dtype="float32")
        results.append(run_all(backend, f"scheduler.overlap={overlap}", f"scheduler.chunked_prefill_size={chunk}"))
        backend.close()
    assert results[0] == results[1]


def test_the_demo_model_says_the_same_after_retractions() -> None:
    pytest.importorskip("torch", reason="needs the torch engine")
    from weft.backends.torch.backend import TorchBackend

    texts = []
    for slots in (2048, 160):
        backend = TorchBackend(Path(BUNDLED_MODEL), dtype="float32")
        pump = Pump(backend, f"kv_cache.max_items={slots}")
        pump.core.scheduler._ratio.value = 0.0
        for number in range(1, 7):
            pump.submit(number, [20 + number] * 8, max_new_tokens=70)
        pump.run()
        texts.append(pump.tokens)
        assert (pump.core.scheduler.meters.retractions > 0) == (slots == 160)
        backend.close()
    assert texts[0] == texts[1]


def test_auto_plans_ahead_only_where_the_backend_says_so() -> None:
    assert Pump(FakeBackend()).core.depth == 1
    assert Pump(FakeBackend(), "scheduler.overlap=true").core.depth == 2


def test_a_cancelled_step_gives_nothing_and_costs_nothing() -> None:
    pump = Pump(FakeBackend(vocab_size=400))
    pump.submit(1, list(range(10, 60)))
    pump.fill()
    (plan,) = pump.flights
    assert not pump.core.scheduler.abandoned(plan)
    pump.core.abort([1])
    assert pump.core.scheduler.abandoned(plan)
    pump.core.backend.cancel(plan.step)
    landing = run_step(pump.core.backend, plan)
    assert isinstance(landing.outcome, StepCancelled)
    pump.core.land(landing)
    pump.flights.clear()
    pump.take()
    assert pump.ends[1].state == "cancelled"
    counts = pump.core.scheduler.cache.counts()
    assert (counts.active, counts.cached) == (0, 0)
    for number in range(2, 6):  # and it is no failure: the engine lives on
        pump.submit(number, [20])
    pump.run()
    assert {pump.ends[k].state for k in range(2, 6)} == {"completed"}


def test_torch_breaks_a_step_off_between_layers() -> None:
    pytest.importorskip("torch", reason="needs the torch engine")
    from weft.backends.torch.backend import TorchBackend

    backend = TorchBackend(Path(BUNDLED_MODEL), dtype="float32")
    pump = Pump(backend)
    pump.submit(1, list(range(10, 60)))
    pump.fill()
    backend.cancel(pump.flights[0].step)
    assert isinstance(run_step(backend, pump.flights[0]).outcome, StepCancelled)
    backend.close()


class Misshapen(FakeBackend):
    """Returns a token too many."""

    def forward(self, plan: StepPlan) -> StepResult:
        result = super().forward(plan)
        return StepResult(np.append(result.tokens, 0))


class Nothing(FakeBackend):
    """Returns no result at all."""

    def forward(self, plan: StepPlan) -> StepResult:
        super().forward(plan)
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("backend", [Misshapen, Nothing])
def test_a_result_of_the_wrong_form_fails_its_step_only(backend: type[FakeBackend]) -> None:
    pump = Pump(backend(vocab_size=400))
    pump.submit(1, [20])
    pump.turn()
    assert pump.ends[1].state == "failed"
    assert pump.ends[1].error is not None and "returned" in pump.ends[1].error.message
    assert pump.core.scheduler.cache.counts().active == 0


def test_an_idle_engine_finds_a_breach_counts_it_and_starts_its_cache_afresh() -> None:
    pump = Pump(FakeBackend(vocab_size=400))
    pump.submit(1, [20, 21, 22])
    pump.run()
    core = pump.core
    core.scheduler.cache.pages.allocate(1)  # a slot that nobody owns
    core._next_scan_s = core._planned_s = 0.0  # as after a quiet while
    core.tick()
    assert core.metrics()["counters"]["invariant_breaches_total"] == 1
    assert core.stats()["kv"]["free"] == core.stats()["kv"]["capacity"]
    pump.submit(2, [20, 21, 22])
    pump.run()
    assert pump.ends[2].state == "completed"


def test_the_runner_computes_in_order_and_wakes_the_loop() -> None:
    backend = FakeBackend(vocab_size=400)
    core = EngineCore(fake_settings("scheduler.overlap=true"), backend)
    core.load()
    woken = threading.Semaphore(0)
    runner = StepRunner(backend, lambda: woken.release)
    core.submit(Submit(1, np.array([20, 21], dtype=np.int32).tobytes(), SamplingParams(max_new_tokens=2)))
    for _ in range(2):
        plan = core.begin()
        assert plan is not None
        runner.start(plan)
    assert [plan.step for plan in runner.in_flight] == [0, 1]
    assert woken.acquire(timeout=30) and woken.acquire(timeout=30)
    landings = runner.take()
    assert [landing.plan.step for landing in landings] == [0, 1]
    assert not runner.in_flight and runner.busy_s() == 0.0
    for landing in landings:
        core.land(landing)
    assert sum(len(output.tokens) for output in core.take_outputs()) == 2


def test_the_token_pool_grows_with_its_rows() -> None:
    pool = TokenPool()
    pump = Pump(FakeBackend(vocab_size=400), "http.max_concurrent_requests=200", "kv_cache.max_items=20000")
    for number in range(1, 101):
        pump.submit(number, [20], max_new_tokens=3)
    pump.fill()
    plan = pump.flights[0]
    pool.store(plan, np.arange(plan.num_rows, dtype=np.int32))
    assert pool._last[plan.table_rows].tolist() == list(range(plan.num_rows))


def test_the_thread_of_the_steps_does_other_work_too() -> None:
    """Loading in another thread costs libgomp's spinning, and so half of the prefill speed (docs/benchmarks.md)."""
    woken = threading.Event()
    runner = StepRunner(FakeBackend(vocab_size=400), lambda: woken.set)
    name = runner.call(lambda: threading.current_thread().name)
    assert name == "steps"

    def broken() -> None:
        raise ModelLoadError("no such model")

    with pytest.raises(ModelLoadError, match="no such model"):
        runner.call(broken)
    assert runner.call(lambda: 1) == 1
    assert not woken.is_set()  # the socket that wakes the loop may be gone when loading has failed
