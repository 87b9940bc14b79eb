"""A compressed radix tree over token ids whose nodes own KV slots.

After the RadixAttention of SGLang (Zheng et al., 2023): an edge carries a run of tokens and as many slots; a node that
some request holds is locked together with all its ancestors; leaves that nobody holds are evicted, the least recently
used first.

Invariants: sibling edges differ in their first page; every edge is a whole number of pages, at least one (the root's is
empty); a parent's `locks` is at least the sum of its children's; a node is never older than its children.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import Int32s

ChildKey = int | bytes


class Node:
    """One edge with its slots.

    `key` and `slots` are int32 arrays of one length; `last_used` is a logical time; `locks` counts the handles that end
    here or below.
    """

    __slots__ = ("key", "slots", "children", "parent", "locks", "last_used", "queued")

    def __init__(self, key: Int32s, slots: Int32s, parent: Node | None, last_used: int) -> None:
        self.key = key
        self.slots = slots
        self.children: dict[ChildKey, Node] = {}
        self.parent = parent
        self.locks = 0
        self.last_used = last_used
        self.queued = False  # has an entry in the eviction heap

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `length` tokens that end at `node`, with their slots (int32 [length])."""

    length: int
    node: Node
    slots: Int32s


class RadixTree:
    """Match, insert, lock, unlock, evict. Counts its tokens by whether somebody holds them."""

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self._time = 0
        self.root = self._new_root()
        self.locked_tokens = 0
        self.unlocked_tokens = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._heap_serial = 0

    # ---- looking up -------------------------------------------------------------------------------------------

    def match(self, tokens: Int32s) -> Match:
        """The longest cached prefix in whole pages; splits the edge where it ends, and marks the path as used."""
        now = self._tick()
        node, length, parts = self.root, 0, []
        self.root.last_used = now
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

    def peek(self, tokens: Int32s) -> int:
        """Length of the longest cached prefix, leaving the tree as it is."""
        node, length = self.root, 0
        while length < len(tokens):
            child = self._child(node, tokens, length)
            if child is None:
                break
            common = self._common(child.key, tokens, length)
            length += common
            if common < len(child):
                break
            node = child
        return length

    # ---- changing ---------------------------------------------------------------------------------------------

    def insert(self, tokens: Int32s, slots: Int32s) -> int:
        """Adds a path of whole pages; returns how many leading tokens were there already.

        The tree takes over `slots` beyond that length; the caller keeps (and frees) its slots before it, since the tree
        has others for those tokens (or the same ones, where they came from a match).
        """
        if len(tokens) != len(slots) or len(tokens) % self.page_size:
            raise InvariantError(f"insert of {len(tokens)} tokens, {len(slots)} slots, page {self.page_size}")
        match = self.match(tokens)
        if match.length < len(tokens):
            key, value = tokens[match.length :].copy(), slots[match.length :].copy()
            leaf = Node(key, value, match.node, self._time)
            match.node.children[self._child_key(key, 0)] = leaf
            self.unlocked_tokens += len(leaf)
            self._offer(leaf)
        return match.length

    def lock(self, node: Node) -> None:
        """Protects the path from the root to `node`; to be undone by exactly one `unlock`."""
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.locked_tokens += len(step)
                self.unlocked_tokens -= len(step)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undoes one `lock`; the path counts as used until now."""
        now = self._tick()
        step: Node | None = node
        while step is not None:
            if step.locks <= 0:
                raise InvariantError("unlock of a node that is not locked")
            step.locks -= 1
            step.last_used = now
            if step.locks == 0:
                self.locked_tokens -= len(step)
                self.unlocked_tokens += len(step)
                self._offer(step)
            step = step.parent

    def evict(self, num_tokens: int) -> Int32s:
        """Removes least recently used leaves until `num_tokens` are gone or nothing is left that may go.

        Returns their slots (int32), whole nodes, so possibly more than asked for. A parent that becomes a bare leaf
        follows in its turn. O(log n) a node: the heap holds one entry for each leaf that nobody holds, and an entry
        that has been overtaken by a use or a lock is corrected when it comes up.
        """
        gone: list[Int32s] = []
        removed = 0
        while removed < num_tokens and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.children or node.parent is None:
                continue
            if last_used != node.last_used:
                self._offer(node)
                continue
            parent = node.parent
            self._remove(node)
            removed += len(node)
            gone.append(node.slots)
            self._offer(parent)
        return np.concatenate(gone) if gone else np.empty(0, dtype=np.int32)

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
        locked = unlocked = 0
        for node in self.nodes():
            if len(node.key) != len(node.slots) or not len(node) or len(node) % self.page_size:
                raise InvariantError(f"node of {len(node.key)} tokens and {len(node.slots)} slots")
            if node.parent is None or node.parent.children.get(self._child_key(node.key, 0)) is not node:
                raise InvariantError("a node is not where its key says")
            if node.locks < sum(child.locks for child in node.children.values()):
                raise InvariantError("a child is locked more often than its parent")
            if node.locks == 0 and not node.children and not node.queued:
                raise InvariantError("an evictable leaf is missing from the heap")
            locked += len(node) if node.locks else 0
            unlocked += 0 if node.locks else len(node)
        if (locked, unlocked) != (self.locked_tokens, self.unlocked_tokens):
            raise InvariantError(
                f"tree counts {self.locked_tokens} locked, {self.unlocked_tokens} unlocked; found {locked}, {unlocked}"
            )

    # ---- insides ----------------------------------------------------------------------------------------------

    def _new_root(self) -> Node:
        empty = np.empty(0, dtype=np.int32)
        return Node(empty, empty, None, 0)

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def _child_key(self, tokens: Int32s, at: int) -> ChildKey:
        if self.page_size == 1:
            return int(tokens[at])
        return tokens[at : at + self.page_size].tobytes()

    def _child(self, node: Node, tokens: Int32s, at: int) -> Node | None:
        if at + self.page_size > len(tokens):
            return None
        return node.children.get(self._child_key(tokens, at))

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
        # A copy: a short common beginning must not keep the arrays of a long prompt alive after the rest was evicted.
        upper = Node(node.key[:at].copy(), node.slots[:at].copy(), parent, node.last_used)
        upper.locks = node.locks
        parent.children[self._child_key(upper.key, 0)] = upper
        node.key, node.slots, node.parent = node.key[at:], node.slots[at:], upper
        upper.children[self._child_key(node.key, 0)] = node
        return upper

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[self._child_key(node.key, 0)]
        self.unlocked_tokens -= len(node)
        node.parent = None

    def _offer(self, node: Node) -> None:
        """Puts a leaf that nobody holds into the heap, once."""
        if node.queued or node.locks or node.children or node.parent is None:
            return
        node.queued = True
        self._heap_serial += 1  # equal times: first come, first evicted, and nodes are never compared
        heapq.heappush(self._heap, (node.last_used, self._heap_serial, node))
