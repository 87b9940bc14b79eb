"""The draw: fixed by seed and position, even over (0, 1), and equal on every machine."""

from __future__ import annotations

import numpy as np

from weft.backends.draw import _mix, uniform, uniforms


def test_splitmix64_reference_sequence() -> None:
    """First outputs of SplitMix64 from seed 1234567, as published with the algorithm."""
    gamma, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + gamma) % 2**64
        outputs.append(_mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_fixed_by_seed_and_index() -> None:
    assert uniform(5, 3) == uniform(5, 3) != uniform(5, 4) != uniform(6, 3)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert uniforms([1, 2], [3, 4]).tolist() == [uniform(1, 3), uniform(2, 4)]


def test_even_and_never_at_the_ends() -> None:
    for numbers in (
        np.array([uniform(9, index) for index in range(20_000)]),
        np.array([uniform(seed, 0) for seed in range(20_000)]),
    ):
        assert numbers.min() > 0 and numbers.max() < 1
        counts = np.histogram(numbers, 20, (0, 1))[0]
        assert np.abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
