"""`Admission`: places for requests, taken on arrival, before anything is tokenized: a full server says so at once.

A place belongs to one answer (one engine id) from its arrival until it has ended or its client has gone; a job takes
all of its places or none. There are as many as the engine can queue and run. The engine has the last word: it knows
what is queued, so it may refuse, or displace, what found a place here.
"""

from __future__ import annotations

from weft.core.errors import QueueFullError


class Admission:
    """Counts places; used from one event loop only.

    Args:
        max_queue_size, max_concurrent_requests: what the engine takes.
        priority: whether requests are ordered by priority. Then a full server lets in what is better than the worst of
            all that have a place, for the engine to displace that one; at most `max_queue_size` at a time.
    """

    def __init__(self, max_queue_size: int, max_concurrent_requests: int, *, priority: bool) -> None:
        self.places = max_queue_size + max_concurrent_requests
        self.used = 0
        self._extra = max_queue_size if priority else 0
        self._priority = priority
        self._used_by_priority: dict[int, int] = {}

    def check_room(self, retry_after_s: float) -> None:
        """Raises QueueFullError when no request can get a place now, whatever its body says."""
        if self.used >= self.places + self._extra:
            raise self._full(retry_after_s)

    def reserve(self, count: int, priority: int, retry_after_s: float) -> None:
        """Takes `count` places. Raises QueueFullError, having taken none."""
        limit = self.places
        if self._priority and self._used_by_priority and priority < max(self._used_by_priority):
            limit += self._extra
        if self.used + count > limit:
            raise self._full(retry_after_s)
        self.used += count
        self._used_by_priority[priority] = self._used_by_priority.get(priority, 0) + count

    def free(self, priority: int, count: int = 1) -> None:
        """Gives back places that were taken with this priority."""
        self.used -= count
        left = self._used_by_priority[priority] - count
        if left:
            self._used_by_priority[priority] = left
        else:
            del self._used_by_priority[priority]

    def _full(self, retry_after_s: float) -> QueueFullError:
        return QueueFullError(f"the queue is full: {self.used} requests are open", retry_after_s=retry_after_s)
