"""The two clocks."""

from __future__ import annotations

import pytest

from weft.core.clock import MonotonicClock, VirtualClock


def test_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(1.5)
    assert clock.now_s() == 6.5
    with pytest.raises(ValueError):
        clock.advance(-0.1)
    assert clock.now_s() == 6.5


def test_monotonic_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    times = [clock.now_s() for _ in range(100)]
    assert times == sorted(times)
