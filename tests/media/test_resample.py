"""Resampling keeps what there is to hear."""

from __future__ import annotations

import numpy as np
import pytest

from weft.media.resample import resampled


def sine(frequency: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize(("rate", "new_rate"), [(22_050, 24_000), (16_000, 24_000), (48_000, 24_000), (44_100, 24_000)])
@pytest.mark.parametrize("frequency", [100.0, 1_000.0, 6_000.0])
def test_a_sine_stays_what_it_is(rate: int, new_rate: int, frequency: float) -> None:
    result = resampled(sine(frequency, rate), rate, new_rate)
    assert result.dtype == np.float32 and len(result) == new_rate // 2
    inner = slice(200, -200)  # the edges see the silence around
    np.testing.assert_allclose(result[inner], sine(frequency, new_rate)[inner], atol=2e-3)


def test_what_the_new_rate_cannot_hold_is_gone() -> None:
    result = resampled(sine(15_000.0, 48_000), 48_000, 24_000)
    assert np.abs(result[200:-200]).max() < 1e-3  # 60 dB


@pytest.mark.parametrize("length", [0, 1, 2, 146, 147, 148, 1000])
def test_lengths(length: int) -> None:
    result = resampled(np.ones(length, np.float32), 22_050, 24_000)
    assert len(result) == -(-length * 160 // 147) and np.isfinite(result).all()


def test_the_same_rate_changes_nothing() -> None:
    samples = sine(440, 24_000)
    assert resampled(samples, 24_000, 24_000) is samples
