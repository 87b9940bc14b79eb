"""`Leases`: sessions that keep their KV between turns, for a time, and within a budget.

Invariants: what all leases hold together (shared nodes counted once) is at most the budget; a session has one lease at
most. The least recently used lease gives way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.core.plan import Int32s
from weft.kv.radix_tree import Node, RadixTree


@dataclass(slots=True)
class _Lease:
    node: Node
    tokens: int
    ends_s: float
    last_used_s: float
    turns: int


class Leases:
    """See the module's docstring.

    Args:
        tree: holds the KV.
        budget_tokens: most that all leases hold together.
        bytes_per_token: of KV.
    """

    def __init__(self, tree: RadixTree, budget_tokens: int, bytes_per_token: int) -> None:
        self._tree = tree
        self._budget = budget_tokens - budget_tokens % tree.page_size
        self._bytes_per_token = bytes_per_token
        self._leases: dict[str, _Lease] = {}  # the least recently used first
        self._next_end_s: float | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, session_id: str, tokens: Int32s, now_s: float, ttl_s: float) -> None:
        """Moves a session's lease to the longest cached prefix of `tokens`, or of their beginning that the budget
        allows. Nothing is held where nothing is cached."""
        match = self._tree.match(tokens[: self._budget])
        old = self._leases.pop(session_id, None)
        if match.length:
            self._tree.lease(match.node)
            turns = 1 if old is None else old.turns + 1
            self._leases[session_id] = _Lease(match.node, match.length, now_s + ttl_s, now_s, turns)
            self._note_end(now_s + ttl_s)
        if old is not None:
            self._tree.end_lease(old.node)
        while self._tree.under_lease_tokens > self._budget and self.yield_one():
            pass

    def renew(self, session_id: str, now_s: float, ttl_s: float) -> None:
        """A session with a lease is in use again."""
        lease = self._leases.pop(session_id, None)
        if lease is None:
            return
        lease.ends_s, lease.last_used_s = now_s + ttl_s, now_s
        self._leases[session_id] = lease
        self._note_end(lease.ends_s)

    def end(self, session_id: str) -> bool:
        """Gives a session's lease up; False if it has none."""
        lease = self._leases.pop(session_id, None)
        if lease is None:
            return False
        self._tree.end_lease(lease.node)
        return True

    def expire(self, now_s: float) -> int:
        """Ends the leases whose time is over; returns how many. Costs nothing while none is due."""
        if self._next_end_s is None or now_s < self._next_end_s:
            return 0
        over = [session_id for session_id, lease in self._leases.items() if lease.ends_s <= now_s]
        for session_id in over:
            self.end(session_id)
        self._next_end_s = min((lease.ends_s for lease in self._leases.values()), default=None)
        return len(over)

    def yield_one(self) -> bool:
        """Gives the least recently used lease up; False if there is none."""
        return bool(self._leases) and self.end(next(iter(self._leases)))

    def list(self, now_s: float) -> list[dict[str, Any]]:
        """The sessions as `GET /v1/sessions` tells them, the least recently used first."""
        return [
            {
                "id": session_id,
                "tokens": lease.tokens,
                "bytes": lease.tokens * self._bytes_per_token,
                "turns": lease.turns,
                "expires_in_s": round(max(0.0, lease.ends_s - now_s), 3),
                "last_used_s_ago": round(max(0.0, now_s - lease.last_used_s), 3),
            }
            for session_id, lease in self._leases.items()
        ]

    def ends(self) -> dict[Node, int]:
        """How many leases end at each node; for checks."""
        found: dict[Node, int] = {}
        for lease in self._leases.values():
            found[lease.node] = found.get(lease.node, 0) + 1
        return found

    def clear(self) -> None:
        """Forgets all leases of a tree that has been cleared."""
        self._leases.clear()
        self._next_end_s = None

    def _note_end(self, ends_s: float) -> None:
        if self._next_end_s is None or ends_s < self._next_end_s:
            self._next_end_s = ends_s
