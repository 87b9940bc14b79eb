"""Time for everything that schedules. Code on floors 1-3 asks a `Clock`, never the operating system."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back; the origin has no meaning."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The operating system's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class FrozenClock:
    """Another clock's time as of the last `refresh`: one event, one time, so that what was decided can be replayed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_s = clock.now_s()

    def now_s(self) -> float:
        return self._now_s

    def refresh(self) -> float:
        """Reads the clock; returns the new time."""
        self._now_s = self._clock.now_s()
        return self._now_s


class VirtualClock:
    """A clock that moves only when told; tests and the simulator use it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back ({seconds} s)")
        self._now_s += seconds
