"""`EngineCore`: what becomes of requests when the backend works, fails, or lacks a feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import fake_settings
from weft.backends.fake.backend import FakeBackend
from weft.core.clock import VirtualClock
from weft.core.plan import StepPlan, StepResult
from weft.core.sampling import SamplingParams
from weft.engine.core import MAX_FAILED_STEPS, EngineCore, EngineDead
from weft.ipc.messages import End, Submit, TokenOutput

BAD_TOKEN = 7


class Bare(FakeBackend):
    """A backend that can do nothing but choose tokens."""

    features = frozenset()


class Engine:
    """An `EngineCore` on a virtual clock, with everything that it has said."""

    def __init__(self, *sets: str, backend: type[FakeBackend] = FakeBackend, **fake: Any) -> None:
        self.clock = VirtualClock()
        given = {"vocab_size": 100, "max_context_tokens": 256, "sleep": self.clock.advance} | fake
        self.core = EngineCore(fake_settings("kv_cache.max_items=1024", *sets), backend(**given), self.clock)
        self.core.load()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}

    def submit(self, request_id: int, prompt: list[int], *, deadline_s: float | None = None, **params: Any) -> None:
        sampling = SamplingParams(**({"max_new_tokens": 3, "temperature": 0, "ignore_eos": True} | params))
        packed = np.array(prompt, dtype=np.int32).tobytes()
        message = Submit(request_id, packed, sampling, arrival_s=self.clock.now_s(), deadline_s=deadline_s)
        self.core.submit(message)

    def step(self) -> list[TokenOutput]:
        return self.take(self.core.step())

    def take(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        for output in outputs:
            assert output.request_id not in self.ends, "an output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.end is not None:
                self.ends[output.request_id] = output.end
        self.core.scheduler.check()
        return outputs

    def run(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("it does not come to an end")


def test_a_request_from_submit_to_end() -> None:
    engine = Engine(tokens_per_s=10.0)
    engine.clock.advance(100.0)
    engine.submit(1, [20, 21, 22, 23])
    engine.clock.advance(2.0)  # it waits
    engine.run()
    end = engine.ends[1]
    assert len(engine.tokens[1]) == 3
    assert (end.state, end.finish_reason, end.error) == ("completed", "length", None)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (4, 3, 0)
    assert end.queue_s == pytest.approx(2.0)
    assert end.prefill_s == pytest.approx(0.4)
    assert end.decode_s == pytest.approx(0.2)
    assert not engine.core.has_work


def test_cached_tokens_are_told() -> None:
    engine = Engine()
    for request_id in (1, 2):
        engine.submit(request_id, list(range(10, 50)))
        engine.run()
    assert [engine.ends[k].cached_tokens for k in (1, 2)] == [0, 39]


def test_the_cache_is_told_while_a_request_runs_and_afterwards() -> None:
    engine = Engine()
    engine.submit(1, list(range(10, 50)))
    engine.step()
    assert [(node["tokens"], node["held"]) for node in engine.core.cache()["nodes"]] == [(40, "request")]
    engine.run()
    told = engine.core.cache()
    assert [node["held"] for node in told["nodes"]] == [None] * len(told["nodes"])
    assert sum(node["tokens"] for node in told["nodes"]) == told["cached"] == 42
    assert told["active"] == 0


@pytest.mark.parametrize("own", [True, False])
def test_an_end_token_is_told_apart(own: bool) -> None:
    probe = Engine()
    probe.submit(1, [20, 21])
    probe.run()
    token = probe.tokens[1][0]
    engine = Engine(eos_token_ids=() if own else (token,))
    engine.submit(1, [20, 21], ignore_eos=False, stop_token_ids=(token,) if own else ())
    (output,) = engine.step()
    assert (output.tokens, output.end_token) == ([token], token)
    assert output.end is not None
    assert (output.end.finish_reason, output.end.stop) == ("stop", token if own else None)
    assert output.end.completion_tokens == 1


def test_a_backend_exception_ends_its_step_and_nothing_else() -> None:
    engine = Engine("scheduler.max_batch_size=1", "scheduler.policy=fcfs", faults={"raise_on_token": BAD_TOKEN})
    engine.submit(1, [BAD_TOKEN])
    engine.submit(2, [20])
    engine.run()
    assert engine.ends[1].state == "failed"
    assert engine.ends[1].error is not None and engine.ends[1].error.http_status == 500
    assert engine.ends[2].state == "completed"
    assert engine.core.scheduler.cache.counts().active == 0


def test_a_broken_row_ends_one_request_of_its_batch() -> None:
    engine = Engine(faults={"nan_on_token": BAD_TOKEN})
    engine.submit(1, [BAD_TOKEN])
    engine.submit(2, [20])
    engine.run()
    assert [engine.ends[k].state for k in (1, 2)] == ["failed", "completed"]


def test_three_failed_steps_in_a_row_are_the_end_of_the_engine() -> None:
    engine = Engine("scheduler.max_batch_size=1", "scheduler.policy=fcfs", faults={"raise_on_token": BAD_TOKEN})
    for request_id in range(1, MAX_FAILED_STEPS + 1):
        engine.submit(request_id, [BAD_TOKEN])
    for _ in range(MAX_FAILED_STEPS - 1):
        engine.step()
    with pytest.raises(EngineDead):
        engine.step()
    engine.take(engine.core.take_outputs())
    assert [engine.ends[k].state for k in range(1, MAX_FAILED_STEPS + 1)] == ["failed"] * MAX_FAILED_STEPS


def test_a_good_step_between_failures_saves_the_engine() -> None:
    engine = Engine(
        "scheduler.max_batch_size=1", "scheduler.policy=fcfs", faults={"raise_on_token": BAD_TOKEN}, vocab_size=1000
    )
    for request_id in range(1, 9):
        engine.submit(request_id, [20] if request_id % 3 == 0 else [BAD_TOKEN], max_new_tokens=1)
    engine.run()
    assert [engine.ends[k].state for k in range(1, 9)].count("completed") == 2


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"logit_bias": {5: 1.0}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ],
)
def test_features_that_the_backend_lacks_are_refused(params: dict[str, Any]) -> None:
    engine = Engine(backend=Bare)
    engine.submit(1, [20], **params)
    assert engine.core.has_work  # the refusal has to be sent
    engine.run()
    end = engine.ends[1]
    assert end.state == "rejected"
    assert end.error is not None and end.error.http_status == 400
    assert engine.core.stats()["requests"]["finished"]["rejected"] == 1


def test_what_cannot_be_served_is_refused_with_its_error() -> None:
    engine = Engine("http.max_queue_size=1", "http.max_concurrent_requests=1")
    engine.submit(1, [])
    engine.submit(2, [20] * 256)
    engine.submit(3, [20])
    engine.submit(4, [20])
    engine.submit(5, [20])
    engine.run()
    errors = {k: end.error for k, end in engine.ends.items() if end.error is not None}
    assert {k: (e.http_status, e.code) for k, e in errors.items()} == {
        1: (400, None),
        2: (400, "context_length_exceeded"),
        5: (429, "queue_full"),
    }
    assert errors[5].retry_after_s is not None
    assert engine.core.stats()["requests"]["finished"] == {
        "completed": 2,
        "timeout": 0,
        "failed": 0,
        "cancelled": 0,
        "rejected": 3,
    }


def test_deadlines_are_scanned_between_steps() -> None:
    engine = Engine("http.request_timeout_s=5", tokens_per_s=1.0)
    engine.submit(1, [20, 21], max_new_tokens=100)
    engine.submit(2, [30, 31], max_new_tokens=100, deadline_s=3.0)
    engine.run()
    assert [engine.ends[k].state for k in (1, 2)] == ["timeout", "timeout"]
    assert engine.ends[2].error is not None and engine.ends[2].error.http_status == 408
    assert engine.clock.now_s() < 10.0
    assert engine.ends[1].completion_tokens == len(engine.tokens[1]) > 0


def test_abort_of_some_of_all_and_of_unknown_ones() -> None:
    engine = Engine()
    for request_id in range(1, 6):
        engine.submit(request_id, [20 + request_id], max_new_tokens=50)
    engine.step()
    engine.core.abort([2, 77])
    engine.step()
    assert set(engine.ends) == {2}
    engine.core.abort([request.request_id for request in engine.core.scheduler.live])
    engine.take(engine.core.take_outputs())
    assert {k: end.state for k, end in engine.ends.items()} == dict.fromkeys(range(1, 6), "cancelled")
    engine.core.abort([2])
    assert not engine.core.has_work
    assert engine.core.scheduler.cache.counts().active == 0


def test_stats_and_flush() -> None:
    engine = Engine()
    engine.submit(1, list(range(10, 30)), max_new_tokens=5)
    engine.step()
    stats = engine.core.stats()
    assert stats["requests"]["processing"] == 1
    assert stats["batch"] == {"rows": 1, "tokens": 20}
    assert not stats["engine"]["idle"]
    assert engine.core.flush_cache() == 0
    engine.run()
    stats = engine.core.stats()
    kv = stats["kv"]
    assert (kv["free"] + kv["cached"], kv["active"], kv["cached"]) == (kv["capacity"], 0, 24)
    assert stats["engine"]["idle"] and stats["batch"] == {"rows": 0, "tokens": 0}
    assert engine.core.flush_cache() == 24
    assert engine.core.stats()["kv"]["bytes"] == 0


def test_prompt_logprobs_reach_the_output_chunk_by_chunk() -> None:
    engine = Engine("scheduler.chunked_prefill_size=4")
    prompt = list(range(10, 20))
    engine.submit(1, prompt, prompt_logprobs=2, logprobs=1)
    items: list[int] = []
    while engine.core.has_work:
        for output in engine.step():
            items += [item.token_id for item in output.prompt_logprobs or []]
            assert len(output.logprobs or []) == len(output.tokens)
    assert items == prompt[1:]


class Garbled(FakeBackend):
    """Answers with tokens that no vocabulary has."""

    def forward(self, plan: StepPlan) -> StepResult:
        result = super().forward(plan)
        result.tokens[:] = 10**6
        return result


def test_tokens_outside_the_vocabulary_end_the_request() -> None:
    engine = Engine(backend=Garbled)
    engine.submit(1, [20])
    engine.run()
    assert engine.ends[1].state == "failed"


def test_a_backend_that_forgets_a_vector_fails_the_step() -> None:
    class Forgetful(FakeBackend):
        def forward(self, plan: StepPlan) -> StepResult:
            result = super().forward(plan)
            result.embeddings.pop(0, None)
            return result

    engine = Engine(backend=Forgetful, embeddings=4)
    engine.submit(1, [20, 21], embed=True, max_new_tokens=None)
    engine.run()
    assert engine.ends[1].error is not None and "no vectors for the rows [0]" in engine.ends[1].error.message


def test_an_embedding_from_submit_to_end() -> None:
    engine = Engine(embeddings=4, tokens_per_s=10.0)
    engine.submit(1, [20, 21, 22], embed=True, max_new_tokens=None)
    (output,) = engine.step()
    assert output.embedding is not None and np.frombuffer(output.embedding, "<f4").shape == (4,)
    end = engine.ends[1]
    assert (end.state, end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("completed", "stop", 3, 0)
    assert end.prefill_s == pytest.approx(0.3) and end.decode_s == 0
