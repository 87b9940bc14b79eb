"""A compressed radix tree over token ids whose nodes own KV slots.

After the RadixAttention of SGLang (Zheng et al., 2023): an edge carries a run of tokens and as many slots; a node that
some request holds is locked together with all its ancestors, one that a session holds is leased in the same way; leaves
that nobody holds are evicted, in the order of the policy.

Invariants: sibling edges differ in their first page; every edge is a whole number of pages, at least one (the root's is
empty); a parent's `locks` is at least the sum of its children's, and so are its `leases`; every leaf that may be
evicted has one entry in the heap. Every change of an edge is told to the listeners.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import Int32s
from weft.kv.fingerprint import EvictedPrefixes, fingerprint, joined, without
from weft.kv.pages import round_up

ChildKey = int | bytes
EvictionPolicy = Literal["lru", "lfu", "fifo"]

MIN_CUT_TOKENS = 256
"""A long leaf loses at least so many tokens at once: its rest is copied each time."""


class Node:
    """One edge with its slots.

    `key` and `slots` are int32 arrays of one length; `end` is how many tokens from the root it ends, `prefix` the
    fingerprint of all of them; `locks` and `leases` count the requests' and the sessions' handles that end here or
    below; `owner` is the request that computed it; `last_used` and `born` are logical times, `uses` counts locks.
    """

    __slots__ = (
        *("key", "slots", "children", "parent", "end", "prefix", "owner"),
        *("locks", "leases", "last_used", "born", "uses", "queued"),
    )

    def __init__(self, key: Int32s, slots: Int32s, parent: Node | None, now: int, owner: int = 0) -> None:
        self.key = key
        self.slots = slots
        self.children: dict[ChildKey, Node] = {}
        self.parent = parent
        self.end: int = len(key) if parent is None else parent.end + len(key)
        self.prefix: int = 0 if parent is None else joined(parent.prefix, fingerprint(key, parent.end))
        self.owner = owner
        self.locks = self.leases = 0
        self.last_used = self.born = now
        self.uses = 0
        self.queued = False  # has an entry in the eviction heap

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `length` tokens from the root that end at `node`; `slots` of those that were looked up."""

    length: int
    node: Node
    slots: Int32s


@dataclass(frozen=True, slots=True)
class Evicted:
    """Slots (int32) that are nobody's any more, and how many of them each request had computed."""

    slots: Int32s
    by_owner: dict[int, int]


Leaving = Callable[[Node, int], None]


class TreeListener(Protocol):
    """Whoever keeps positions in the tree."""

    def edge_changed(self, parent: Node, key: ChildKey) -> None:
        """The edge `key` below `parent` appeared, was split, was cut at its end, or is gone."""

    def node_removed(self, node: Node, parent: Node) -> None:
        """`node`, a leaf below `parent`, has left the tree."""


class RadixTree:
    """Match, insert, lock, lease, evict. Counts its tokens by who holds them.

    Attributes:
        locked_tokens: held by requests. leased_tokens: by sessions alone. evictable_tokens: by nobody.
        under_lease_tokens: held by sessions, whether requests hold them too or not.
        num_nodes: all but the root.
        evicted: where something was cut off; see `EvictedPrefixes`.
    """

    def __init__(self, page_size: int = 1, policy: EvictionPolicy = "lru") -> None:
        self.page_size = page_size
        self.policy = policy
        self.listeners: list[TreeListener] = []
        self.evicted = EvictedPrefixes()
        self._time = 0
        empty = np.empty(0, dtype=np.int32)
        self.root = Node(empty, empty, None, 0)
        self.clear()

    def clear(self) -> None:
        """Forgets everything at once; nobody may hold or rest at anything."""
        self.root.children.clear()
        self.root.locks = self.root.leases = 0
        self.locked_tokens = self.leased_tokens = self.evictable_tokens = self.under_lease_tokens = 0
        self.num_nodes = 0
        self._heap: list[tuple[tuple[int, int], int, Node]] = []
        self._heap_serial = 0

    @property
    def unlocked_tokens(self) -> int:
        return self.leased_tokens + self.evictable_tokens

    # ---- looking up -------------------------------------------------------------------------------------------

    def match(self, tokens: Int32s, *, below: Node | None = None) -> Match:
        """The longest cached prefix in whole pages; splits the edge where it ends, and marks what it passes as used.

        `below`: a node that is known to be on the way; the search goes on from its end.
        """
        now = self._tick()
        node = self.root if below is None else below
        length = node.end
        node.last_used = now
        parts: list[Int32s] = []
        while length < len(tokens):
            child = self._child(node, tokens, length)
            if child is None:
                break
            common = self._common(child.key, tokens, length)
            partial = common < len(child)
            if partial:
                child = self._split(child, common)
            child.last_used = now
            parts.append(child.slots)
            node, length = child, length + common
            if partial:
                break
        slots = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        return Match(length, node, slots)

    def descend(self, node: Node, tokens: Int32s) -> tuple[Node, int]:
        """From the end of `node` on, without a change: the deepest node that matches wholly, and how many tokens from
        the root match, those of the edge that goes on included."""
        length = node.end
        while length < len(tokens):
            child = self._child(node, tokens, length)
            if child is None:
                break
            common = self._common(child.key, tokens, length)
            length += common
            if common < len(child):
                break
            node = child
        return node, length

    def peek(self, tokens: Int32s) -> int:
        """Length of the longest cached prefix, leaving the tree as it is."""
        return self.descend(self.root, tokens)[1]

    def child_key(self, tokens: Int32s, at: int) -> ChildKey:
        """What an edge is called that goes on with `tokens[at:]`: its first page."""
        if self.page_size == 1:
            return int(tokens[at])
        return tokens[at : at + self.page_size].tobytes()

    # ---- changing ---------------------------------------------------------------------------------------------

    def insert(self, tokens: Int32s, slots: Int32s, *, below: Node | None = None, owner: int = 0) -> Match:
        """Adds a path of whole pages. Returns what was there already: its length, and its slots past `below`.

        `slots` are those of all tokens, or of those past `below`. The tree takes over what lies beyond the match; the
        caller keeps (and frees) its slots before that, since the tree has others for those tokens. The `node` of the
        match is where the whole path ends now.
        """
        start = 0 if below is None else below.end
        if len(tokens) - start != len(slots) or len(tokens) % self.page_size:
            raise InvariantError(f"insert of {len(tokens)} tokens from {start}, {len(slots)} slots")
        match = self.match(tokens, below=below)
        if match.length == len(tokens):
            return match
        key, value = tokens[match.length :].copy(), slots[match.length - start :].copy()
        leaf = Node(key, value, match.node, self._time, owner)
        first = self.child_key(key, 0)
        match.node.children[first] = leaf
        self.evictable_tokens += len(leaf)
        self.num_nodes += 1
        self._offer(leaf)
        self._tell(match.node, first)
        return Match(match.length, leaf, match.slots)

    def lock(self, node: Node, *, above: Node | None = None) -> None:
        """Protects the path from the root to `node` for a request; to be undone by exactly one `unlock`.

        `above`: a node on the path up to which it is locked for this request already; the lock moves down from there.
        """
        step: Node | None = node
        while step is not above and step is not None:
            if not step.locks:
                self._count(step, -1)
            step.locks += 1
            step.uses += 1
            if step.locks == 1:
                self._count(step, 1)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undoes one `lock`; the path counts as used until now."""
        now = self._tick()
        step: Node | None = node
        while step is not None:
            if step.locks <= 0:
                raise InvariantError("unlock of a node that is not locked")
            if step.locks == 1:
                self._count(step, -1)
            step.locks -= 1
            step.last_used = now
            if not step.locks:
                self._count(step, 1)
                self._offer(step)
            step = step.parent

    def lease(self, node: Node) -> None:
        """Protects the path from the root to `node` for a session; to be undone by exactly one `end_lease`."""
        step: Node | None = node
        while step is not None:
            self._count(step, -1)
            step.leases += 1
            self._count(step, 1)
            step = step.parent

    def end_lease(self, node: Node) -> None:
        """Undoes one `lease`."""
        step: Node | None = node
        while step is not None:
            if step.leases <= 0:
                raise InvariantError("the end of a lease that nobody has")
            self._count(step, -1)
            step.leases -= 1
            self._count(step, 1)
            self._offer(step)
            step = step.parent

    def evict(self, num_tokens: int, leaving: Leaving | None = None) -> Evicted:
        """Removes what the policy says from the leaves until `num_tokens` are gone or nothing is left that may go.

        `leaving` is told of each leaf, and of the position from which on it goes, before it does.

        The last leaf is cut at its end if it is much longer than what is wanted. A parent that becomes a bare leaf
        follows in its turn. O(log n) a node: the heap holds one entry for each leaf that nobody holds, and an entry
        that has been overtaken by a use or a lock is corrected when it comes up.
        """
        gone: list[Int32s] = []
        by_owner: dict[int, int] = {}
        removed = 0
        while removed < num_tokens and self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.leases or node.children or node.parent is None:
                continue
            if rank != self._rank(node):
                self._offer(node)
                continue
            cut = min(len(node), round_up(max(num_tokens - removed, MIN_CUT_TOKENS), self.page_size))
            if leaving is not None:
                leaving(node, node.end - cut)
            slots = self._cut(node, cut) if cut < len(node) else self._remove(node)
            removed += len(slots)
            gone.append(slots)
            by_owner[node.owner] = by_owner.get(node.owner, 0) + len(slots)
        return Evicted(np.concatenate(gone) if gone else np.empty(0, dtype=np.int32), by_owner)

    def evict_leaf(self, leaving: Leaving | None = None) -> Evicted | None:
        """Removes one whole leaf, the first that `evict` would take; None if there is none that may go."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.leases or node.children or node.parent is None:
                continue
            if rank == self._rank(node):
                if leaving is not None:
                    leaving(node, node.end - len(node))
                return Evicted(self._remove(node), {node.owner: len(node)})
            self._offer(node)
        return None

    # ---- checking ---------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises InvariantError where the tree contradicts itself."""
        locked = leased = evictable = under_lease = num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            size = len(node.key)
            parent = node.parent
            if size != len(node.slots) or not size or size % self.page_size:
                raise InvariantError(f"node of {size} tokens and {len(node.slots)} slots")
            if parent is None or parent.children.get(self.child_key(node.key, 0)) is not node:
                raise InvariantError("a node is not where its key says")
            if node.end != parent.end + size:
                raise InvariantError(f"a node of {size} tokens below {parent.end} ends at {node.end}")
            if node.children:
                below = node.children.values()
                if node.locks < sum(c.locks for c in below) or node.leases < sum(c.leases for c in below):
                    raise InvariantError("a child is held more often than its parent")
            elif not node.locks and not node.leases and not node.queued:
                raise InvariantError("an evictable leaf is missing from the heap")
            under_lease += size if node.leases else 0
            if node.locks:
                locked += size
            elif node.leases:
                leased += size
            else:
                evictable += size
        found = (locked, leased, evictable, under_lease)
        counted = (self.locked_tokens, self.leased_tokens, self.evictable_tokens, self.under_lease_tokens)
        if found != counted:
            raise InvariantError(f"tree counts {counted} locked, leased, evictable, under lease; found {found}")
        if num_nodes != self.num_nodes:
            raise InvariantError(f"the tree counts {self.num_nodes} nodes; found {num_nodes}")

    # ---- insides ----------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def _tell(self, parent: Node, key: ChildKey) -> None:
        for listener in self.listeners:
            listener.edge_changed(parent, key)

    def _count(self, node: Node, sign: int) -> None:
        """Adds a node to the counters of whoever holds it, or takes it out of them."""
        size = sign * len(node.key)
        if node.locks:
            self.locked_tokens += size
        elif node.leases:
            self.leased_tokens += size
        else:
            self.evictable_tokens += size
        if node.leases:
            self.under_lease_tokens += size

    def _child(self, node: Node, tokens: Int32s, at: int) -> Node | None:
        if at + self.page_size > len(tokens):
            return None
        return node.children.get(self.child_key(tokens, at))

    def _common(self, key: Int32s, tokens: Int32s, at: int) -> int:
        """Leading tokens, in whole pages, that `key` shares with `tokens[at:]`."""
        size = min(len(key), len(tokens) - at)
        differs = key[:size] != tokens[at : at + size]
        first = int(differs.argmax()) if size else 0
        common = first if size and differs[first] else size
        return common - common % self.page_size

    def _split(self, node: Node, at: int) -> Node:
        """Cuts `node` after `at` tokens; returns the new upper part. Whoever held `node` holds both parts."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node)
        # Copies: a short part must not keep the arrays of a long prompt alive after the rest was evicted.
        upper = Node(node.key[:at].copy(), node.slots[:at].copy(), parent, node.last_used, node.owner)
        upper.locks, upper.leases = node.locks, node.leases
        upper.born, upper.uses = node.born, node.uses
        first = self.child_key(upper.key, 0)
        parent.children[first] = upper
        node.key, node.slots, node.parent = node.key[at:].copy(), node.slots[at:].copy(), upper
        upper.children[self.child_key(node.key, 0)] = node
        self.num_nodes += 1
        self._tell(parent, first)
        return upper

    def _cut(self, node: Node, size: int) -> Int32s:
        """Takes the last `size` tokens from a leaf; returns their slots."""
        parent = node.parent
        assert parent is not None
        keep = len(node) - size
        end, slots = node.key[keep:], node.slots[keep:].copy()
        node.prefix = without(node.prefix, fingerprint(end, node.end - size))
        self.evicted.add(node.prefix, self.child_key(end, 0))
        node.key, node.slots = node.key[:keep].copy(), node.slots[:keep].copy()
        node.end -= size
        self.evictable_tokens -= size
        self._offer(node)
        self._tell(parent, self.child_key(node.key, 0))
        return slots

    def _remove(self, node: Node) -> Int32s:
        """Takes a leaf out; returns its slots."""
        parent, key = node.parent, self.child_key(node.key, 0)
        assert parent is not None
        del parent.children[key]
        self.evicted.add(parent.prefix, key)
        self.evictable_tokens -= len(node)
        self.num_nodes -= 1
        node.parent = None
        self._offer(parent)
        for listener in self.listeners:
            listener.node_removed(node, parent)
        self._tell(parent, key)
        return node.slots

    def _rank(self, node: Node) -> tuple[int, int]:
        """The lowest goes first."""
        if self.policy == "lru":
            return node.last_used, 0
        if self.policy == "lfu":
            return node.uses, node.last_used
        return node.born, 0

    def _offer(self, node: Node) -> None:
        """Puts a leaf that nobody holds into the heap, once."""
        if node.queued or node.locks or node.leases or node.children or node.parent is None:
            return
        node.queued = True
        self._heap_serial += 1  # equal ranks: first come, first evicted, and nodes are never compared
        heapq.heappush(self._heap, (self._rank(node), self._heap_serial, node))
