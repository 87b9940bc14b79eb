"""`Ledger`: how much of the KV each request has computed, and when that was last of use."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import InvariantError


@dataclass(slots=True)
class LedgerEntry:
    """One request's KV.

    Attributes:
        items: slots that it filled or keeps for itself, in the tree or in its tail; also after it has ended.
        last_used_s: when a request last computed with them or started from them, on the engine's clock.
    """

    items: int
    last_used_s: float


class Ledger:
    """Invariant: the items of all entries are the slots that are not free; nobody has none."""

    def __init__(self, bytes_per_token: int) -> None:
        self.total = 0
        self._bytes_per_token = bytes_per_token
        self._entries: dict[int, LedgerEntry] = {}

    def entry(self, request_id: int) -> LedgerEntry | None:
        """None when nothing of the request is held (any more)."""
        return self._entries.get(request_id)

    def bytes(self, request_id: int) -> int:
        entry = self._entries.get(request_id)
        return 0 if entry is None else entry.items * self._bytes_per_token

    def charge(self, request_id: int, items: int, now_s: float) -> None:
        """The request got slots."""
        entry = self._entries.get(request_id)
        if entry is None:
            self._entries[request_id] = LedgerEntry(items, now_s)
        else:
            entry.items += items
            entry.last_used_s = now_s
        self.total += items

    def discharge(self, request_id: int, items: int) -> None:
        """Slots of the request are free again."""
        if not items:
            return
        entry = self._entries.get(request_id)
        if entry is None or entry.items < items:
            raise InvariantError(f"request {request_id} gives {items} slots back that it never got: {entry}")
        entry.items -= items
        self.total -= items
        if not entry.items:
            del self._entries[request_id]

    def touch(self, request_id: int, now_s: float) -> None:
        """Somebody started from what the request computed."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.last_used_s = now_s

    def clear(self) -> None:
        self._entries.clear()
        self.total = 0

    def check(self, used_slots: int) -> None:
        """Raises InvariantError where the books do not add up."""
        items = sum(entry.items for entry in self._entries.values())
        if not items == self.total == used_slots or any(e.items <= 0 for e in self._entries.values()):
            raise InvariantError(f"the ledger counts {items} slots (in all {self.total}), {used_slots} are used")
