"""How fast requests have been ending lately: what `Retry-After` is computed from."""

from __future__ import annotations

from collections import deque

WINDOW = 32
MIN_S, MAX_S = 1.0, 60.0


class Pace:
    """The times of the last `WINDOW` endings."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW)

    def note(self, now_s: float) -> None:
        """A request has ended."""
        self._times.append(now_s)

    def seconds_for(self, endings: float) -> float:
        """How long so many endings will take at the present pace, between `MIN_S` and `MAX_S`."""
        if len(self._times) < 2:
            return MIN_S
        interval_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return min(MAX_S, max(MIN_S, endings * interval_s))
