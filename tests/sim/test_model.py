"""The simulator's model is the fake engine's."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.sim.rig import run, system
from weft.backends.fake.backend import FakeBackend, kv_values, next_token
from weft.core.plan import StepPlan, StepResult
from weft.sim import model
from weft.sim.model import HashModel, choose, total_of


def test_choose_is_next_token() -> None:
    tokens = np.arange(40, dtype=np.int32) * 7 % 50
    history = kv_values(tokens, np.arange(40, dtype=np.int32))
    seeds, indices = np.array([0, 2**64 - 1, 5, 5], dtype=np.uint64), np.array([0, 0, 1, 900])
    banned = {2: tuple(range(0, 50, 2)), 3: ()}
    chosen = choose(np.full(4, total_of(tokens)), seeds, indices, 50, banned)
    expected = [
        next_token(history, 50, seed=int(s), index=int(i), banned=banned.get(row, ()))
        for row, (s, i) in enumerate(zip(seeds, indices, strict=True))
    ]
    assert chosen.tolist() == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_whole_steps_are_those_of_the_fake_engine(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    served = system("kv_cache.max_items=2048", depth=depth)
    backend = FakeBackend(vocab_size=served.header.model.vocab_size)
    backend.allocate_kv(served.header.cache.capacity)
    original = HashModel.forward
    steps = 0

    def both(self: HashModel, plan: StepPlan) -> StepResult:
        nonlocal steps
        steps += 1
        fake = backend.forward(copy.deepcopy(plan))
        result = original(self, plan)
        np.testing.assert_array_equal(result.tokens, fake.tokens)
        return result

    monkeypatch.setattr(model.HashModel, "forward", both)
    run(2, 60, serve=served)
    assert steps > 50
