"""`PrefixCache`: the one place where slots change hands between free list, tree and live requests.

Every slot is at each moment in exactly one of three places: the free list, one tree node, or the tail of one live
request. A request's table row reads: [0, prefix.length) slots of the tree, locked for it; [prefix.length,
allocated_len) its own tail, of which [.., cached_len) hold computed KV. `free + cached + active = capacity`, where
`active` is tails and locked nodes and `cached` is the other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import Int32s
from weft.core.request import Request
from weft.kv.pages import PageAllocator, ReqToTokenPool, round_up
from weft.kv.radix_tree import Node, RadixTree


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A locked prefix: `length` tokens that end at `node`."""

    length: int
    node: Node


@dataclass(frozen=True, slots=True)
class KvCounts:
    """Tokens by place; see `PrefixCache`."""

    capacity: int
    free: int
    cached: int
    active: int
    evicted_total: int


class PrefixCache:
    """Joins the page allocator, the radix tree and the request table.

    Args:
        capacity: slots in the pool (rounded down to whole pages).
        page_size: slots in a page; prefixes are shared in whole pages.
        max_rows: live requests at once.
        max_len: longest sequence, in tokens.
        retain: "prefix" leaves an ended request's KV in the tree; "none" forgets it as soon as nobody shares it.
    """

    def __init__(
        self,
        capacity: int,
        *,
        page_size: int = 1,
        max_rows: int,
        max_len: int,
        retain: Literal["prefix", "none"] = "prefix",
    ) -> None:
        self.page_size = page_size
        self.retain = retain
        self.evicted_total = 0
        self.pages = PageAllocator(capacity, page_size)
        self.tree = RadixTree(page_size)
        self.rows = ReqToTokenPool(max_rows, round_up(max_len, page_size))

    @property
    def capacity(self) -> int:
        return self.pages.capacity

    @property
    def available(self) -> int:
        """Slots that can be had at once: free ones and what nobody holds."""
        return self.pages.free_slots + self.tree.unlocked_tokens

    def counts(self) -> KvCounts:
        free, cached = self.pages.free_slots, self.tree.unlocked_tokens
        return KvCounts(self.capacity, free, cached, self.capacity - free - cached, self.evicted_total)

    # ---- a request's way through the cache --------------------------------------------------------------------

    def peek(self, tokens: Int32s) -> int:
        """Tokens of this prompt that are cached now, leaving the one that must be computed to get logits."""
        return self.tree.peek(tokens[: len(tokens) - 1])

    def attach(self, request: Request, *, reuse: bool = True) -> None:
        """Gives the request a row and the longest cached prefix, locked; sets `cached_len`.

        At least one token is left to compute, since its logits are wanted.
        """
        if request.row >= 0:
            raise InvariantError(f"{request!r} is attached already")
        tokens = request.tokens[: request.device_len - 1] if reuse else request.tokens[:0]
        match = self.tree.match(tokens)
        self.tree.lock(match.node)
        request.row = self.rows.take()
        request.prefix = PrefixHandle(match.length, match.node)
        request.cached_len = request.allocated_len = match.length
        self.rows.table[request.row, : match.length] = match.slots

    def room_needed(self, request: Request, new_len: int) -> int:
        """Slots that `extend` to `new_len` tokens would take."""
        return max(0, round_up(new_len, self.page_size) - request.allocated_len)

    def extend(self, request: Request, new_len: int) -> None:
        """Makes room for tokens up to `new_len`, evicting where needed; the caller has checked `available`."""
        needed = self.room_needed(request, new_len)
        if not needed:
            return
        if needed > self.pages.free_slots:
            self.evict(needed - self.pages.free_slots)
        start = request.allocated_len
        self.rows.table[request.row, start : start + needed] = self.pages.allocate(needed)
        request.allocated_len = start + needed

    def cache_unfinished(self, request: Request) -> None:
        """Shares what the request has computed so far: inserts it, and moves its lock to the longer prefix.

        Where another request was faster, the tree's slots take the place of the request's own, which are freed.
        """
        old: PrefixHandle = request.prefix
        length = request.cached_len - request.cached_len % self.page_size
        if length <= old.length:
            return
        row = self.rows.table[request.row]
        tokens = request.tokens[:length]
        existing = self.tree.insert(tokens, row[:length])
        match = self.tree.match(tokens)
        if match.length != length:
            raise InvariantError(f"{request!r}: inserted {length} tokens, found {match.length}")
        self.tree.lock(match.node)
        self.tree.unlock(old.node)
        self.pages.free(row[old.length : existing].copy())
        row[old.length : existing] = match.slots[old.length : existing]
        request.prefix = PrefixHandle(length, match.node)

    def cache_finished(self, request: Request, *, keep: bool = True) -> None:
        """Takes everything back: row, lock and tail; what was computed stays in the tree if `keep` and `retain` say so.

        Idempotent: a request that holds nothing is left alone.
        """
        if request.row < 0:
            return
        old: PrefixHandle = request.prefix
        row = self.rows.table[request.row, : request.allocated_len]
        length = request.cached_len - request.cached_len % self.page_size
        if keep and self.retain == "prefix" and length > old.length:
            existing = self.tree.insert(request.tokens[:length], row[:length])
            self.pages.free(row[old.length : existing])
            self.pages.free(row[length:])
        else:
            self.pages.free(row[old.length :])
        self.tree.unlock(old.node)
        if self.retain == "none":
            self.pages.free(self.tree.evict(self.tree.unlocked_tokens))
        self.rows.give_back(request.row)
        request.row, request.prefix, request.allocated_len = -1, None, 0

    # ---- all of it --------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Frees at least `num_tokens` of what nobody holds, if there is so much; returns how many."""
        slots = self.tree.evict(num_tokens)
        self.pages.free(slots)
        self.evicted_total += len(slots)
        return len(slots)

    def flush(self) -> int:
        """Forgets everything that nobody holds; returns how many tokens."""
        return self.evict(self.tree.unlocked_tokens)

    def check(self, live: Iterable[Request]) -> None:
        """Proves the invariants against all live requests; raises InvariantError with the first breach."""
        self.tree.check()
        owners = self.pages.free_mask().astype(np.int32)
        for node in self.tree.nodes():
            np.add.at(owners, node.slots, 1)
        locks: dict[Node, int] = {}
        used_rows = 0
        for request in live:
            if request.row < 0:
                continue
            used_rows += 1
            self._check_request(request)
            np.add.at(owners, self.rows.table[request.row, request.prefix.length : request.allocated_len], 1)
            held: Node | None = request.prefix.node
            while held is not None:
                locks[held] = locks.get(held, 0) + 1
                held = held.parent
        if (owners != 1).any():
            slot = int(np.flatnonzero(owners != 1)[0])
            raise InvariantError(f"slot {slot} has {owners[slot]} owners")
        for node in self.tree.nodes():
            if node.locks != locks.get(node, 0):
                raise InvariantError(f"a node has {node.locks} locks, {locks.get(node, 0)} requests hold it")
        if used_rows + self.rows.free_rows != len(self.rows.table):
            raise InvariantError(f"{used_rows} rows in use and {self.rows.free_rows} free of {len(self.rows.table)}")

    def _check_request(self, request: Request) -> None:
        prefix: PrefixHandle = request.prefix
        if not prefix.length <= request.cached_len <= request.allocated_len:
            raise InvariantError(f"{request!r}: prefix {prefix.length}, allocated {request.allocated_len}")
        end, node = prefix.length, prefix.node
        while (parent := node.parent) is not None:
            start = end - len(node)
            if start < 0 or not np.array_equal(node.key, request.tokens[start:end]):
                raise InvariantError(f"{request!r}: its prefix is not what the tree holds")
            if not np.array_equal(node.slots, self.rows.table[request.row, start:end]):
                raise InvariantError(f"{request!r}: its table row and the tree disagree")
            end, node = start, parent
        if end or node is not self.tree.root:
            raise InvariantError(f"{request!r}: its prefix does not start at the root")
