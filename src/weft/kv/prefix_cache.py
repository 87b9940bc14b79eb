"""`PrefixCache`: the one place where slots change hands between free list, tree and live requests.

Every slot is at each moment in exactly one of three places: the free list, one tree node, or the tail of one live
request. A request's table row reads: [0, prefix.length) slots of the tree, locked for it; [prefix.length,
allocated_len) its own tail, of which [.., cached_len) hold computed KV. `free + cached + active = capacity`, where
`active` is tails and locked nodes and `cached` is the other nodes, leased or evictable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import Int32s, KvOp
from weft.core.request import CacheMiss, Request
from weft.kv.leases import Leases
from weft.kv.ledger import Ledger
from weft.kv.pages import PageAllocator, ReqToTokenPool, round_up
from weft.kv.radix_tree import Evicted, EvictionPolicy, Match, Node, RadixTree
from weft.kv.sequences import Sequences

LEASE_SHARE = 0.5
"""Sessions hold at most this share of the cache."""


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A locked prefix: `length` tokens that end at `node`."""

    length: int
    node: Node


@dataclass(frozen=True, slots=True)
class KvCounts:
    """Tokens by place; see `PrefixCache`. `leased` is the part of `cached` that sessions protect."""

    capacity: int
    free: int
    cached: int
    active: int
    leased: int
    evicted_total: int


class PrefixCache:
    """Joins the page allocator, the radix tree and the request table.

    Args:
        capacity: slots in the pool (rounded down to whole pages).
        page_size: slots in a page; prefixes are shared in whole pages.
        max_rows: live requests at once.
        max_len: longest sequence, in tokens.
        retain: "prefix" leaves an ended request's KV in the tree; "none" forgets it as soon as nobody shares it.
        eviction_policy: what is forgotten first.
        eviction_threshold: share of the capacity above which what nobody holds is forgotten.
        bytes_per_token: of KV, for what is told to people.
        num_sequences: sequence ids of an engine that stores KV under such; every request then needs one (`bind`), and
            every leaf of the tree keeps one.
        shares: whether a prefix can be shared at all; some models (recurrent ones) keep one state for a whole sequence.
    """

    def __init__(
        self,
        capacity: int,
        *,
        page_size: int = 1,
        max_rows: int,
        max_len: int,
        retain: Literal["prefix", "none"] = "prefix",
        eviction_policy: EvictionPolicy = "lru",
        eviction_threshold: float = 1.0,
        bytes_per_token: int = 0,
        num_sequences: int | None = None,
        shares: bool = True,
    ) -> None:
        self.page_size = page_size
        self.retain = retain if shares else "none"
        self.shares = shares
        self.evicted_total = 0
        self.pages = PageAllocator(capacity, page_size)
        self.tree = RadixTree(page_size, eviction_policy)
        self.rows = ReqToTokenPool(max_rows, round_up(max_len, page_size))
        self.ledger = Ledger(bytes_per_token)
        self.leases = Leases(self.tree, int(self.capacity * LEASE_SHARE), bytes_per_token)
        self.sequences = Sequences(self.tree, num_sequences) if num_sequences is not None else None
        self._least_free = self.capacity - int(self.capacity * eviction_threshold)

    @property
    def capacity(self) -> int:
        return self.pages.capacity

    @property
    def available(self) -> int:
        """Slots that can be had at once: free ones and what nobody holds."""
        return self.pages.free_slots + self.tree.evictable_tokens

    def counts(self) -> KvCounts:
        free, cached = self.pages.free_slots, self.tree.unlocked_tokens
        active = self.capacity - free - cached
        return KvCounts(self.capacity, free, cached, active, self.tree.leased_tokens, self.evicted_total)

    # ---- a request's way through the cache --------------------------------------------------------------------

    def peek(self, keys: Int32s) -> int:
        """Tokens of a prompt with these keys that are cached now, leaving the one that is computed to get logits."""
        return self.tree.peek(keys[: len(keys) - 1])

    def attach(self, request: Request, *, reuse: bool = True, now_s: float = 0.0) -> None:
        """Gives the request a row and the longest cached prefix, locked; sets `cached_len` and `miss`.

        At least one token is left to compute, since its logits are wanted.
        """
        if request.row >= 0:
            raise InvariantError(f"{request!r} is attached already")
        keys = request.keys(0, request.device_len - 1)
        reuse = reuse and self.shares
        match = self.tree.match(keys if reuse else keys[:0])
        request.miss = self._miss(keys, match) if reuse else CacheMiss("not_used", 0)
        self.tree.lock(match.node)
        node: Node | None = match.node
        while node is not None:
            self.ledger.touch(node.owner, now_s)
            node = node.parent
        request.row = self.rows.take()
        request.prefix = PrefixHandle(match.length, match.node)
        request.cached_len = request.allocated_len = match.length
        self.rows.table[request.row, : match.length] = match.slots

    def bind(self, request: Request) -> bool:
        """Gives an attached request its sequence, where the engine has such; False if none can be had now."""
        return self.sequences is None or self.sequences.bind(request, self._evict_leaf)

    def sequences_of(self, requests: Sequence[Request]) -> Int32s | None:
        """int32 [R], the sequences of bound requests; None where the engine has no such thing."""
        if self.sequences is None:
            return None
        return np.array([self.sequences.pool.of(request) for request in requests], dtype=np.int32)

    def take_ops(self) -> tuple[KvOp, ...]:
        """What the engine has to do to its sequences before the next step."""
        return self.sequences.take_ops() if self.sequences is not None else ()

    def room_needed(self, request: Request, new_len: int) -> int:
        """Slots that `extend` to `new_len` tokens would take."""
        return max(0, round_up(new_len, self.page_size) - request.allocated_len)

    def extend(self, request: Request, new_len: int, now_s: float = 0.0) -> None:
        """Makes room for tokens up to `new_len`, evicting where needed; the caller has checked `available`."""
        needed = self.room_needed(request, new_len)
        if not needed:
            return
        start = request.allocated_len
        self.rows.table[request.row, start : start + needed] = self._allocate(needed)
        request.allocated_len = start + needed
        self.ledger.charge(request.request_id, needed, now_s)

    def extend_by_one(self, requests: Sequence[Request], now_s: float = 0.0) -> None:
        """Makes room for one more token (number `planned_len`) of each; like `extend`, all at once."""
        short = [request for request in requests if request.planned_len == request.allocated_len]
        if not short:
            return
        page = self.page_size
        slots = self._allocate(len(short) * page).reshape(len(short), page)
        rows = np.array([request.row for request in short])[:, None]
        places = np.array([request.allocated_len for request in short])[:, None] + np.arange(page)
        self.rows.table[rows, places] = slots
        for request in short:
            request.allocated_len += page
            self.ledger.charge(request.request_id, page, now_s)

    def cache_unfinished(self, request: Request) -> None:
        """Shares what the request has computed so far: inserts it, and moves its lock to the longer prefix.

        Where another request was faster, the tree's slots take the place of the request's own, which are freed.
        """
        old: PrefixHandle = request.prefix
        length = request.cached_len - request.cached_len % self.page_size
        if length <= old.length or not self.shares:
            return
        row = self.rows.table[request.row]
        match = self._insert(request, row, length)
        self.tree.lock(match.node, above=old.node)
        existing = match.length
        self._give_back(request, row[old.length : existing].copy())
        row[old.length : existing] = match.slots
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
            match = self._insert(request, row, length)
            self._give_back(request, row[old.length : match.length])
            self._give_back(request, row[length:])
        else:
            self._give_back(request, row[old.length :])
        if self.sequences is not None and self.sequences.pool.has(request):
            self.sequences.unbind(request)
        self.tree.unlock(old.node)
        if self.retain == "none":
            self._forget(self.tree.evictable_tokens)
        self.rows.give_back(request.row)
        request.row, request.prefix, request.allocated_len = -1, None, 0

    # ---- sessions: see `Leases` -------------------------------------------------------------------------------

    def lease(self, session_id: str, keys: Int32s, now_s: float, ttl_s: float) -> None:
        """A turn of the session has ended: protects its KV (`keys` are those of the request, what it has computed).

        With `retain` "none" nothing of it is left to protect.
        """
        self.leases.hold(session_id, keys, now_s, ttl_s)

    def renew_lease(self, session_id: str, now_s: float, ttl_s: float) -> None:
        self.leases.renew(session_id, now_s, ttl_s)

    def end_lease(self, session_id: str) -> bool:
        return self.leases.end(session_id)

    def expire_leases(self, now_s: float) -> int:
        return self.leases.expire(now_s)

    def yield_lease(self) -> bool:
        """Gives one session up for a request that could not run otherwise; False if there is none."""
        return self.leases.yield_one()

    def sessions(self, now_s: float) -> list[dict[str, Any]]:
        return self.leases.list(now_s)

    # ---- all of it --------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Frees at least `num_tokens` of what nobody holds, if there is so much; returns how many."""
        freed = self._forget(num_tokens)
        self.evicted_total += freed
        return freed

    def trim(self) -> int:
        """Evicts down to the threshold, as far as nobody holds what is above it; returns how many tokens went."""
        excess = min(self._least_free - self.pages.free_slots, self.tree.evictable_tokens)
        return self.evict(excess) if excess > 0 else 0

    def flush(self) -> int:
        """Forgets everything that no request and no session holds; returns how many tokens."""
        return self.evict(self.tree.evictable_tokens)

    def reset(self) -> None:
        """Starts afresh, whatever was wrong; no request may be live."""
        self.tree.clear()
        if self.sequences is not None:
            self.sequences.reset()
        self.leases.clear()
        self.ledger.clear()
        self.pages = PageAllocator(self.capacity, self.page_size)
        self.rows = ReqToTokenPool(*self.rows.table.shape)

    def check(self, live: Iterable[Request]) -> None:
        """Proves the invariants against all live requests; raises InvariantError with the first breach."""
        live = list(live)
        self.tree.check()
        nodes = list(self.tree.nodes())
        parts = [node.slots for node in nodes]
        locks: dict[Node, int] = {}
        used_rows = 0
        for request in live:
            if request.row < 0:
                continue
            used_rows += 1
            self._check_request(request)
            parts.append(self.rows.table[request.row, request.prefix.length : request.allocated_len])
            _count_path(locks, request.prefix.node, 1)
        leases: dict[Node, int] = {}
        for node, count in self.leases.ends().items():
            _count_path(leases, node, count)
        used = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        owners = np.bincount(used, minlength=self.capacity) + self.pages.free_mask()
        if len(owners) != self.capacity or (owners != 1).any():
            slot = int(np.flatnonzero(owners != 1)[0])
            raise InvariantError(f"slot {slot} has {owners[slot]} owners")
        for node in nodes:
            if node.locks != locks.get(node, 0) or node.leases != leases.get(node, 0):
                raise InvariantError(
                    f"a node has {node.locks} locks and {node.leases} leases;"
                    f" {locks.get(node, 0)} requests and {leases.get(node, 0)} sessions hold it"
                )
        if used_rows + self.rows.free_rows != len(self.rows.table):
            raise InvariantError(f"{used_rows} rows in use and {self.rows.free_rows} free of {len(self.rows.table)}")
        if self.tree.under_lease_tokens > self.capacity * LEASE_SHARE:
            raise InvariantError(f"sessions hold {self.tree.under_lease_tokens} of {self.capacity} slots")
        if self.sequences is not None:
            self.sequences.check(live)
        self.ledger.check(self.capacity - self.pages.free_slots)

    # ---- insides ----------------------------------------------------------------------------------------------

    def _allocate(self, num_slots: int) -> Int32s:
        """Free slots, evicting where needed; then as much again as the threshold asks for."""
        if num_slots > self.pages.free_slots:
            self.evict(num_slots - self.pages.free_slots)
        slots = self.pages.allocate(num_slots)
        if self.pages.free_slots < self._least_free:
            self.trim()
        return slots

    def _give_back(self, request: Request, slots: Int32s) -> None:
        """Slots of the request's own tail become free."""
        self.pages.free(slots)
        self.ledger.discharge(request.request_id, len(slots))

    def _insert(self, request: Request, row: Int32s, length: int) -> Match:
        """The request's own tokens up to `length` go into the tree, below the prefix that it has locked."""
        old: PrefixHandle = request.prefix
        match = self.tree.insert(
            request.keys(0, length), row[old.length : length], below=old.node, owner=request.request_id
        )
        if self.sequences is not None:
            self.sequences.inserted(request, old.length, match, length)
        return match

    def _evict_leaf(self) -> bool:
        """Forgets one leaf that nobody holds, for the sake of its sequence; False if there is none."""
        evicted = self.tree.evict_leaf()
        if evicted is None:
            return False
        self.evicted_total += self._take_back(evicted)
        return True

    def _forget(self, num_tokens: int) -> int:
        return self._take_back(self.tree.evict(num_tokens))

    def _take_back(self, evicted: Evicted) -> int:
        """What has left the tree becomes free; returns how many tokens."""
        self.pages.free(evicted.slots)
        for owner, count in evicted.by_owner.items():
            self.ledger.discharge(owner, count)
        return len(evicted.slots)

    def _miss(self, keys: Int32s, match: Match) -> CacheMiss | None:
        """Why no more of `keys` was found; None if all that could be was."""
        at = match.length
        if at + self.page_size > len(keys):
            return None
        if (match.node.prefix, self.tree.child_key(keys, at)) in self.tree.evicted:
            return CacheMiss("evicted", at)
        return CacheMiss("diverged" if at and match.node.children else "never_seen", at)

    def _check_request(self, request: Request) -> None:
        prefix: PrefixHandle = request.prefix
        if not prefix.length <= request.cached_len <= request.allocated_len:
            raise InvariantError(f"{request!r}: prefix {prefix.length}, allocated {request.allocated_len}")
        keys, row = request.keys(0, request.cached_len), self.rows.table[request.row]
        end, node = prefix.length, prefix.node
        while (parent := node.parent) is not None:
            start = end - len(node)
            if start < 0 or (node.key != keys[start:end]).any():
                raise InvariantError(f"{request!r}: its prefix is not what the tree holds")
            if (node.slots != row[start:end]).any():
                raise InvariantError(f"{request!r}: its table row and the tree disagree")
            end, node = start, parent
        if end or node is not self.tree.root:
            raise InvariantError(f"{request!r}: its prefix does not start at the root")


def _count_path(counts: dict[Node, int], node: Node | None, count: int) -> None:
    """Adds to the count of every node from `node` up to the root."""
    while node is not None:
        counts[node] = counts.get(node, 0) + count
        node = node.parent
