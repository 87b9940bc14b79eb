"""Counts of measured values by size, cheap enough for every step and every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds for times between a fast step and a slow answer."""


class Histogram:
    """Prometheus' histogram: how many values were at most each of the bounds, and their sum.

    Attributes:
        bounds: ascending upper bounds; one more bucket takes what is above all of them.
        counts: values in each bucket, not cumulated; `len(bounds) + 1` of them.
        total: sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> dict[str, object]:
        """{"bounds", "counts", "total"}, plain lists and numbers for a message."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}
