"""The radix tree over sequences: for engines that store KV under sequence ids and find a cell's place themselves.

Such an engine (llama.cpp with a unified cache) knows cells, each with a position and a set of sequence ids; a sequence
sees the cells that carry its id. Here every slot of the tree stands for one cell, so that all counting stays as it is,
and this module says which ids the cells must carry. It decides; the engine is told by `KvOp`s, in the order in which
they have to be done, with the next step.

Invariants: a live request has one sequence of its own, which covers its tokens from 0 on without a hole; every leaf of
the tree is held by exactly one sequence, which covers the whole path down to it; one sequence may do both, when a
request continues a leaf, or is the one that made it. An id is free when it does neither. Cells go before their id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.core.errors import InvariantError
from weft.core.plan import TO_THE_END, KvOp
from weft.core.request import Request
from weft.kv.radix_tree import ChildKey, Match, Node, RadixTree
from weft.kv.whole import Whole


class SequencePool:
    """Ids 0 to `total` - 1: free, or used by a request, or holding a leaf, or both.

    Raises InvariantError for an id that is handed out twice or given back by somebody who does not have it.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"{total} sequences")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._of: dict[int, int] = {}
        self._requests: list[Request | None] = [None] * total
        self._leaves: list[Node | Whole | None] = [None] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def of(self, request: Request) -> int:
        """The sequence of a request that has one."""
        sequence = self._of.get(request.request_id)
        if sequence is None:
            raise InvariantError(f"{request!r} has no sequence")
        return sequence

    def has(self, request: Request) -> bool:
        return request.request_id in self._of

    def user(self, sequence: int) -> Request | None:
        return self._requests[sequence]

    def leaf(self, sequence: int) -> Node | Whole | None:
        return self._leaves[sequence]

    def users(self) -> list[Request]:
        return [request for request in self._requests if request is not None]

    def allocate(self, request: Request) -> int:
        """A free id for a request; the caller has looked whether there is one."""
        if not self._free:
            raise InvariantError("no free sequence")
        sequence = self._free.pop()
        self.adopt(request, sequence)
        return sequence

    def adopt(self, request: Request, sequence: int) -> None:
        """The request goes on where this sequence ends."""
        if self._requests[sequence] is not None or request.request_id in self._of:
            raise InvariantError(f"sequence {sequence} or {request!r} is bound already")
        self._requests[sequence] = request
        self._of[request.request_id] = sequence

    def leave(self, request: Request) -> int:
        """The request does not use its sequence any more; the caller frees the id, or keeps it."""
        sequence = self.of(request)
        del self._of[request.request_id]
        self._requests[sequence] = None
        return sequence

    def hold(self, sequence: int, leaf: Node | Whole | None) -> None:
        """Notes the leaf that this sequence holds (or what else it is kept for); None: no leaf any more."""
        self._leaves[sequence] = leaf

    def is_idle(self, sequence: int) -> bool:
        return self._requests[sequence] is None and self._leaves[sequence] is None

    def give_back(self, sequence: int) -> None:
        """An idle id whose cells are gone becomes free."""
        if not self.is_idle(sequence) or sequence in self._free:
            raise InvariantError(f"sequence {sequence} is in use, or free already")
        self._free.append(sequence)


class Sequences:
    """Follows the tree as a listener, and `PrefixCache` step by step.

    Args:
        tree: with pages of one token.
        total: ids.
    """

    def __init__(self, tree: RadixTree, total: int) -> None:
        if tree.page_size != 1:
            raise ValueError(f"sequences need pages of one token, not of {tree.page_size}")
        self.pool = SequencePool(total)
        self._tree = tree
        self._holder: dict[Node, int] = {}
        self._covers = [0] * total  # positions that a holder keeps: its leaf's end when that was last looked at
        self._ops: list[KvOp] = []
        tree.listeners.append(self)

    def take_ops(self) -> tuple[KvOp, ...]:
        """What is to be done since the last call, in order."""
        ops, self._ops = tuple(self._ops), []
        return ops

    # ---- requests ---------------------------------------------------------------------------------------------

    def bind(self, request: Request, evict_leaf: Callable[[], bool]) -> bool:
        """Gives an attached request a sequence that covers its prefix; False if no id can be had now.

        It goes on with the sequence that holds its prefix, where nobody else does; otherwise it shares the cells.
        `evict_leaf` forgets one leaf that nobody holds, and says whether there was one.
        """
        node: Node = request.prefix.node
        while not self._adopt(request, node):
            if self.pool.free:
                sequence = self.pool.allocate(request)
                if request.prefix.length:
                    self._copy(self.cover(node), sequence, 0, request.prefix.length)
                return True
            if not (self._reclaim() or evict_leaf()):
                return False
        return True

    def inserted(self, request: Request, start: int, match: Match, end: int) -> None:
        """The tokens [start, end) of a request went into the tree, beyond the prefix that it has locked.

        `match` is what the tree answered. Where the tree had some of them already, the request takes over its cells.
        """
        sequence, node = self.pool.of(request), match.node
        is_new = match.length < end
        above = node.parent if is_new else node
        assert above is not None
        if match.length > start:
            source = self.cover(above, besides=node if is_new else None)
            self._remove(sequence, start, match.length)
            self._copy(source, sequence, start, match.length)
        if is_new:
            self._let_go(above)  # it is a leaf no more
            old = self.pool.leaf(sequence)
            if isinstance(old, Node):
                self._let_go(old)
            self._hold(sequence, node)

    def unbind(self, request: Request) -> None:
        """The request is over; its sequence stays if it holds a leaf, without what lies beyond."""
        sequence = self.pool.leave(request)
        if self.pool.leaf(sequence) is None:
            self._free(sequence)
        else:
            self._remove(sequence, self._covers[sequence], TO_THE_END)

    def cover(self, node: Node, besides: Node | None = None) -> int:
        """A sequence that covers the path down to `node`; that below `besides` does not count."""
        while (sequence := self._holder.get(node)) is None:
            node = next(child for child in node.children.values() if child is not besides)
        return sequence

    # ---- whole sequences: see `WholeSequences` ------------------------------------------------------------------

    def keep(self, request: Request, entry: Whole) -> None:
        """The request is over, and its sequence stays as it is."""
        sequence = self.pool.leave(request)
        self.pool.hold(sequence, entry)

    def take(self, request: Request, entry: Whole) -> None:
        """The request goes on with a kept sequence."""
        self.pool.hold(entry.sequence, None)
        self.pool.adopt(request, entry.sequence)

    def forget(self, entry: Whole) -> None:
        """A kept sequence is not needed any more."""
        self.pool.hold(entry.sequence, None)
        self._free(entry.sequence)

    # ---- the second tier: see `HostTier` ----------------------------------------------------------------------

    def save(self, piece: int, sequence: int, start: int, end: int) -> None:
        self._ops.append(KvOp("save", sequence, start, end, piece=piece))

    def load(self, piece: int, sequence: int, start: int, end: int) -> None:
        self._ops.append(KvOp("load", sequence, start, end, piece=piece))

    def drop(self, piece: int) -> None:
        self._ops.append(KvOp("drop", -1, 0, 0, piece=piece))

    # ---- the tree ---------------------------------------------------------------------------------------------

    def edge_changed(self, parent: Node, key: ChildKey) -> None:
        """A leaf may have been cut at its end."""
        node = parent.children.get(key)
        sequence = self._holder.get(node) if node is not None else None
        if node is not None and sequence is not None and node.end < self._covers[sequence]:
            self._shorten(sequence, node.end)

    def node_removed(self, node: Node, parent: Node) -> None:
        """Its holder now holds the parent, if that has become a leaf."""
        sequence = self._holder.pop(node)
        self.pool.hold(sequence, None)
        if parent.parent is not None and not parent.children:
            self._hold(sequence, parent)
            self._shorten(sequence, parent.end)
        elif self.pool.is_idle(sequence):
            self._free(sequence)

    # ---- all of it --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Starts afresh: no request is live, the tree is empty, and the engine has to drop every cell."""
        self._holder.clear()
        self.pool = SequencePool(self.pool.total)
        self._ops = [op for op in self._ops if op.kind in ("save", "drop")]  # the second tier's books go by them
        self._ops += [KvOp("remove", sequence, 0, TO_THE_END) for sequence in range(self.pool.total)]

    def check(self, live: Iterable[Request]) -> None:
        """Raises InvariantError where ids, leaves and requests do not fit together."""
        pool = self.pool
        bound = [request for request in live if request.row >= 0]
        for request in bound:
            if pool.user(pool.of(request)) is not request:
                raise InvariantError(f"the sequence of {request!r} is another's")
        if len(pool.users()) != len(bound):
            raise InvariantError(f"{len(pool.users())} sequences are bound, {len(bound)} requests live")
        leaves = [node for node in self._tree.nodes() if not node.children]
        if self._holder.keys() != dict.fromkeys(leaves).keys():
            raise InvariantError(f"{len(self._holder)} nodes are held by sequences, {len(leaves)} leaves")
        for node, sequence in self._holder.items():
            if pool.leaf(sequence) is not node or self._covers[sequence] != node.end:
                raise InvariantError(f"sequence {sequence} does not hold the leaf that it should")
            user = pool.user(sequence)
            if user is not None and user.cached_len < node.end:
                raise InvariantError(f"sequence {sequence} holds {node.end} tokens, {user!r} has fewer")
        used = sum(not pool.is_idle(sequence) for sequence in range(pool.total))
        if used + pool.free != pool.total:
            raise InvariantError(f"{used} sequences in use and {pool.free} free of {pool.total}")

    # ---- insides ----------------------------------------------------------------------------------------------

    def _adopt(self, request: Request, node: Node) -> bool:
        sequence = self._holder.get(node)
        if sequence is None or self.pool.user(sequence) is not None:
            return False
        self.pool.adopt(request, sequence)
        return True

    def _reclaim(self) -> bool:
        """Frees an id that holds a leaf beside a request that ends there too and could hold it as well."""
        for request in self.pool.users():
            node: Node = request.prefix.node
            spare, own = self._holder.get(node), self.pool.of(request)
            if spare is None or spare == own or self.pool.user(spare) is not None or self.pool.leaf(own) is not None:
                continue
            self._let_go(node)
            self._hold(own, node)
            return True
        return False

    def _hold(self, sequence: int, node: Node) -> None:
        self._holder[node] = sequence
        self._covers[sequence] = node.end
        self.pool.hold(sequence, node)

    def _let_go(self, node: Node) -> None:
        """Whoever holds this node, if anybody, does so no more."""
        sequence = self._holder.pop(node, None)
        if sequence is None:
            return
        self.pool.hold(sequence, None)
        if self.pool.is_idle(sequence):
            self._free(sequence)

    def _shorten(self, sequence: int, end: int) -> None:
        """A holder keeps less than before. Only what nobody uses is ever cut, so no request needs the rest."""
        self._covers[sequence] = end
        if self.pool.user(sequence) is None:
            self._remove(sequence, end, TO_THE_END)

    def _free(self, sequence: int) -> None:
        self._remove(sequence, 0, TO_THE_END)
        self.pool.give_back(sequence)

    def _copy(self, source: int, sequence: int, start: int, end: int) -> None:
        self._ops.append(KvOp("copy", sequence, start, end, source))

    def _remove(self, sequence: int, start: int, end: int) -> None:
        self._ops.append(KvOp("remove", sequence, start, end))
