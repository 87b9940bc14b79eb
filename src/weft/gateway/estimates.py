"""How long turns take: a moving average per kind, and from it what those who wait are told."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

UNKNOWN_TURN_S = 5.0
"""Taken for a turn while none has succeeded yet."""


class TurnTimes:
    """Exponential moving averages of successful turns, in seconds, by kind. `alpha`: weight of the newest."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._mean_s: dict[str, float] = {}

    def succeeded(self, kind: str, took_s: float) -> None:
        """A turn has ended well. Others are not counted: a failure says nothing about how long an answer takes."""
        mean = self._mean_s.get(kind)
        self._mean_s[kind] = took_s if mean is None else mean + self._alpha * (took_s - mean)

    def expected_s(self, kind: str) -> float:
        """Of a kind that has not been seen: the mean of the others."""
        if kind in self._mean_s:
            return self._mean_s[kind]
        if self._mean_s:
            return sum(self._mean_s.values()) / len(self._mean_s)
        return UNKNOWN_TURN_S

    def waits_s(self, left_s: Iterable[float], free: int, waiting: Iterable[str]) -> list[float]:
        """When each of those who wait will have a place: `left_s` of the turns that run, and `free` places besides."""
        ends = [0.0] * free + [max(0.0, left) for left in left_s]
        heapq.heapify(ends)
        waits: list[float] = []
        for kind in waiting:
            begins = heapq.heappop(ends) if ends else 0.0
            waits.append(begins)
            heapq.heappush(ends, begins + self.expected_s(kind))
        return waits
