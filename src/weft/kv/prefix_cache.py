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
from weft.core.plan import PIECE_TOKENS, Int32s, KvOp
from weft.core.request import CacheMiss, Request
from weft.kv.fingerprint import fingerprint, joined
from weft.kv.host import HostTier, Part
from weft.kv.leases import Leases
from weft.kv.ledger import Ledger
from weft.kv.pages import PageAllocator, ReqToTokenPool, round_up
from weft.kv.radix_tree import Evicted, EvictionPolicy, Match, Node, RadixTree
from weft.kv.sequences import Sequences
from weft.kv.whole import Whole, WholeSequences

DEMOTED_AT_ONCE = PIECE_TOKENS
"""Tokens that go to the second tier beside one step, unless room is needed."""
LEASE_SHARE = 0.5
"""Sessions hold at most this share of the cache."""


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A locked prefix: `length` tokens that end at `node`.

    What else is there is had with `bind`: `parts` follow the prefix and come back from the host's memory; `whole` is a
    kept sequence that the request goes on with.
    """

    length: int
    node: Node
    parts: tuple[Part, ...] = ()
    whole: Whole | None = None


@dataclass(frozen=True, slots=True)
class KvCounts:
    """Tokens by place; see `PrefixCache`. `leased` is the part of `cached` that sessions protect; `host` are in the
    second tier. `evicted_total` were forgotten by both."""

    capacity: int
    free: int
    cached: int
    active: int
    leased: int
    evicted_total: int
    host: int = 0


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
        shares: whether a prefix can be shared at all; some models (recurrent ones) keep one state for a whole sequence,
            and then only whole sequences are kept (`WholeSequences`).
        host_tokens: the second tier's capacity; 0: none. Needs `num_sequences`.
        resident_tokens: with a second tier, so many tokens that nobody holds stay with the engine.
        piece_tokens: see `HostTier`.
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
        host_tokens: int = 0,
        resident_tokens: int = 0,
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        self.page_size = page_size
        self.retain = retain
        self.shares = shares
        self.evicted_total = 0
        self.pages = PageAllocator(capacity, page_size)
        self.tree = RadixTree(page_size, eviction_policy)
        self.rows = ReqToTokenPool(max_rows, round_up(max_len, page_size))
        self.ledger = Ledger(bytes_per_token)
        self.leases = Leases(self.tree, int(self.capacity * LEASE_SHARE), bytes_per_token)
        self.sequences = Sequences(self.tree, num_sequences) if num_sequences is not None else None
        self.whole = WholeSequences()
        self.host: HostTier | None = None
        if host_tokens and self.sequences is not None and self.retain == "prefix" and shares:
            self.host = HostTier(self.sequences, self.tree.evicted, host_tokens, piece_tokens)
        self._resident_tokens = resident_tokens
        self._least_free = self.capacity - int(self.capacity * eviction_threshold)

    @property
    def capacity(self) -> int:
        return self.pages.capacity

    @property
    def available(self) -> int:
        """Slots that can be had at once: free ones and what nobody holds."""
        return self.pages.free_slots + self.evictable

    @property
    def evictable(self) -> int:
        """Slots of what nobody holds."""
        return self.tree.evictable_tokens + self.whole.tokens

    @property
    def leases_kv(self) -> bool:
        """Whether a session's KV can be kept for it."""
        return self.retain == "prefix" and self.shares

    def counts(self) -> KvCounts:
        free, cached = self.pages.free_slots, self.tree.unlocked_tokens + self.whole.tokens
        active = self.capacity - free - cached
        evicted, host = self.evicted_total, 0
        if self.host is not None:
            evicted, host = evicted + self.host.dropped_total, self.host.tokens
        return KvCounts(self.capacity, free, cached, active, self.tree.leased_tokens, evicted, host)

    # ---- a request's way through the cache --------------------------------------------------------------------

    def peek(self, keys: Int32s) -> int:
        """Tokens of a prompt with these keys that are cached now, leaving the one that is computed to get logits."""
        return self._peek(keys[: len(keys) - 1])

    def _peek(self, keys: Int32s) -> int:
        if not self.shares:
            whole = self.whole.match(keys)
            return 0 if whole is None else len(whole)
        length = self.tree.peek(keys)
        if self.host is None:
            return length
        parts = self.host.find(keys, length, fingerprint(keys[:length], 0))
        return parts[-1].end if parts else length

    def attach(self, request: Request, *, reuse: bool = True, now_s: float = 0.0) -> None:
        """Gives the request a row and the longest cached prefix, locked; sets `cached_len` and `miss`.

        At least one token is left to compute, since its logits are wanted. No prefix ends within an image or a sound.
        """
        if request.row >= 0:
            raise InvariantError(f"{request!r} is attached already")
        keys = request.keys(0, request.device_len - 1)
        wanted = self._without_split_media(request, keys) if request.media else keys
        match = self.tree.match(wanted if reuse and self.shares else keys[:0])
        parts = self.host.find(wanted, match.length, match.node.prefix) if reuse and self.host is not None else []
        whole = self.whole.match(wanted) if reuse and not self.shares else None
        cached = parts[-1].end if parts else len(whole) if whole is not None else match.length
        request.miss = self._miss(keys, match, cached, parts) if reuse else CacheMiss("not_used", 0)
        self.tree.lock(match.node)
        node: Node | None = match.node
        while node is not None:
            self.ledger.touch(node.owner, now_s)
            node = node.parent
        request.row = self.rows.take()
        request.prefix = PrefixHandle(match.length, match.node, tuple(parts), whole)
        request.allocated_len = match.length
        request.cached_len = cached  # what lies beyond the prefix is had with `bind`, before anything builds on it
        self.rows.table[request.row, : match.length] = match.slots

    def bind(self, request: Request, now_s: float = 0.0) -> bool:
        """Gives an attached request its sequence, where the engine has such; False if none can be had now.

        What `attach` has found besides the locked prefix becomes the request's; the caller has checked `available`.
        """
        if self.sequences is None:
            return True
        whole, parts = request.prefix.whole, request.prefix.parts
        if whole is not None:
            self._take_whole(request, whole, now_s)
            return True
        if self.host is None or not parts:
            return self.sequences.bind(request, self._evict_leaf)
        self.host.pin(parts, 1)
        bound = self.sequences.bind(request, self._evict_leaf)
        if bound:
            self.extend(request, request.cached_len, now_s)
            self.host.restore(parts, self.sequences.pool.of(request))
        self.host.pin(parts, -1)
        self.host.trim()
        return bound

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
        if keep and self.retain == "prefix" and length and not self.shares and self.sequences is not None:
            self._give_back(request, row[length:])
            self._keep_whole(request, row[:length].copy())
        elif keep and self.retain == "prefix" and length > old.length and self.shares:
            match = self._insert(request, row, length)
            self._give_back(request, row[old.length : match.length])
            self._give_back(request, row[length:])
        else:
            self._give_back(request, row[old.length :])
        if self.sequences is not None and self.sequences.pool.has(request):
            self.sequences.unbind(request)
        self.tree.unlock(old.node)
        if self.retain == "none":
            self._forget(self.evictable)
        self.rows.give_back(request.row)
        request.row, request.prefix, request.allocated_len = -1, None, 0

    def distrust(self, request: Request) -> None:
        """The request failed: what the second tier gave it at its start may be the cause, and is forgotten there."""
        if self.host is not None and request.prefix is not None:
            self.host.forget(request.prefix.parts)

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
        if self.host is not None:
            return self._take_back(self.tree.evict(num_tokens, self.host.demote))
        freed = self._forget(num_tokens)
        self.evicted_total += freed
        return freed

    def trim(self) -> int:
        """Evicts down to the threshold, as far as nobody holds what is above it; returns how many tokens went."""
        excess = min(self._least_free - self.pages.free_slots, self.evictable)
        return self.evict(excess) if excess > 0 else 0

    def demote(self) -> int:
        """With a second tier: some of what is cold beyond `resident_tokens` goes there; returns how many tokens.

        Cells that nobody uses slow every step of an engine that looks through all of them. So little goes at once that
        the step which carries it out hardly takes longer.
        """
        excess = self.tree.evictable_tokens - self._resident_tokens
        if self.host is None or excess <= 0:
            return 0
        return self.evict(min(excess, DEMOTED_AT_ONCE))

    def flush(self) -> int:
        """Forgets everything that no request and no session holds; returns how many tokens."""
        if self.host is not None:
            self.host.clear()
        freed = self._forget(self.evictable)
        self.evicted_total += freed
        return freed

    def reset(self) -> None:
        """Starts afresh, whatever was wrong; no request may be live."""
        self.tree.clear()
        self.whole = WholeSequences()
        if self.sequences is not None:
            self.sequences.reset()
        if self.host is not None:
            self.host.clear()
        self.leases.clear()
        self.ledger.clear()
        self.pages = PageAllocator(self.capacity, self.page_size)
        self.rows = ReqToTokenPool(*self.rows.table.shape)

    def check(self, live: Iterable[Request]) -> None:
        """Proves the invariants against all live requests; raises InvariantError with the first breach."""
        live = list(live)
        self.tree.check()
        nodes = list(self.tree.nodes())
        parts = [node.slots for node in nodes] + [entry.slots for entry in self.whole.entries()]
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
        if self.host is not None:
            self.host.check()
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
        if not self.shares:
            return self.evict(1) > 0
        evicted = self.tree.evict_leaf(self.host.demote if self.host is not None else None)
        if evicted is None:
            return False
        freed = self._take_back(evicted)
        self.evicted_total += freed if self.host is None else 0
        return True

    def _forget(self, num_tokens: int) -> int:
        if self.shares:
            return self._take_back(self.tree.evict(num_tokens))
        freed = 0
        while freed < num_tokens and (oldest := self.whole.oldest()) is not None:
            freed += self._forget_whole(oldest)
        return freed

    def _keep_whole(self, request: Request, slots: Int32s) -> None:
        """The sequence of an ended request stays as it is, in the place of one with the same tokens."""
        assert self.sequences is not None
        tokens = request.keys(0, len(slots)).copy()
        same = self.whole.match(tokens)
        if same is not None and len(same) == len(tokens):
            self._forget_whole(same)
        entry = Whole(self.sequences.pool.of(request), tokens, slots, request.request_id)
        self.sequences.keep(request, entry)
        self.whole.add(entry)

    def _take_whole(self, request: Request, entry: Whole, now_s: float) -> None:
        assert self.sequences is not None
        self.whole.remove(entry)
        self.sequences.take(request, entry)
        self.rows.table[request.row, : len(entry)] = entry.slots
        request.allocated_len = len(entry)
        self.ledger.discharge(entry.owner, len(entry))
        self.ledger.charge(request.request_id, len(entry), now_s)

    def _forget_whole(self, entry: Whole) -> int:
        assert self.sequences is not None
        self.whole.remove(entry)
        self.sequences.forget(entry)
        return self._take_back(Evicted(entry.slots, {entry.owner: len(entry)}))

    def _take_back(self, evicted: Evicted) -> int:
        """What has left the tree becomes free; returns how many tokens."""
        self.pages.free(evicted.slots)
        for owner, count in evicted.by_owner.items():
            self.ledger.discharge(owner, count)
        return len(evicted.slots)

    def _without_split_media(self, request: Request, keys: Int32s) -> Int32s:
        """As much of `keys` that what is cached of it ends within no medium.

        A few keys may agree by chance, those of all of a medium never; and an engine computes a medium at once.
        """
        while (length := request.without_split_media(found := self._peek(keys))) < found:
            keys = keys[:length]
        return keys

    def _miss(self, keys: Int32s, match: Match, at: int, parts: Sequence[Part]) -> CacheMiss | None:
        """Why no more than `at` of `keys` was found, by `match` in the tree and `parts` beyond; None if all was."""
        if at + self.page_size > len(keys):
            return None
        prefix = joined(match.node.prefix, fingerprint(keys[match.length : at], match.length))
        if (prefix, self.tree.child_key(keys, at)) in self.tree.evicted:
            return CacheMiss("evicted", at)
        went_on = parts[-1].end < parts[-1].piece.end if parts else match.length and match.node.children
        return CacheMiss("diverged" if went_on else "never_seen", at)

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
