"""`PrefixTracker`: how much of each waiting prompt is cached, kept up to date while the tree changes.

Looking every prompt up anew for each step is what makes others give cache-aware order up when the queue is long. Here
every request rests at the node where its cached prefix ends, in the bucket of the page that it would go on with. A
change of the tree concerns one edge, so only the requests of one bucket are looked up again, from their node on, and
only when somebody asks for the order.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.plan import Int32s
from weft.core.request import Request
from weft.kv.radix_tree import ChildKey, Node, RadixTree


class _Place:
    """Where a request rests: at the end of `node`; `length` counts the tokens of the edge that goes on from there, too,
    and `key` names that edge (None: less than a page is left)."""

    __slots__ = ("request", "keys", "node", "length", "key")

    def __init__(self, request: Request, keys: Int32s, root: Node) -> None:
        self.request = request
        self.keys = keys
        self.node = root
        self.length = 0
        self.key: ChildKey | None = None


_Bucket = dict[int, _Place]


class PrefixTracker:
    """See the module's docstring. A `TreeListener`.

    Attributes:
        uncached_tokens: tokens over all tracked prompts that are not cached (as of the last `refresh`).
    """

    def __init__(self, tree: RadixTree) -> None:
        self.uncached_tokens = 0
        self._tree = tree
        self._places: dict[int, _Place] = {}
        self._at: dict[Node, dict[ChildKey | None, _Bucket]] = {}
        self._stale: dict[tuple[Node, ChildKey | None], None] = {}
        tree.listeners.append(self)

    def add(self, request: Request) -> int:
        """Tracks a waiting request; returns how many of its tokens are cached."""
        place = _Place(request, request.keys(0, request.device_len - 1), self._tree.root)
        self._places[request.request_id] = place
        self._rest(place)
        self.uncached_tokens += len(place.keys) - place.length
        return place.length

    def remove(self, request: Request) -> None:
        place = self._places.pop(request.request_id)
        self._leave(place)
        self.uncached_tokens -= len(place.keys) - place.length

    def cached(self, request: Request) -> int:
        """Cached tokens of a tracked prompt, as of the last `refresh`."""
        return self._places[request.request_id].length

    def refresh(self) -> list[Request]:
        """Catches up with the tree; the requests whose cached length has changed."""
        changed: list[Request] = []
        while self._stale:
            (node, key), _ = self._stale.popitem()
            for place in list(self._at.get(node, {}).get(key, {}).values()):
                before = place.length
                self._leave(place)
                self._rest(place)
                if place.length != before:
                    self.uncached_tokens += before - place.length
                    changed.append(place.request)
        return changed

    def branches(self) -> Iterator[tuple[Node, list[Request]]]:
        """Every node where requests rest, with them."""
        for node, buckets in self._at.items():
            yield node, [place.request for bucket in buckets.values() for place in bucket.values()]

    # ---- what the tree tells ----------------------------------------------------------------------------------

    def edge_changed(self, parent: Node, key: ChildKey) -> None:
        """The edge `key` below `parent` appeared, was split, was cut at its end, or is gone."""
        buckets = self._at.get(parent)
        if buckets is not None and key in buckets:
            self._stale[parent, key] = None
        child = parent.children.get(key)
        if child is not None and child in self._at:  # only a cut leaves a child in place with requests at its end
            self._send_home(child)

    def node_removed(self, node: Node, parent: Node) -> None:
        """`node` left the tree; who rested there is looked up anew."""
        if node in self._at:
            self._send_home(node)

    # ---- insides ----------------------------------------------------------------------------------------------

    def _send_home(self, node: Node) -> None:
        """Those at `node` have to start again from the root."""
        root = self._tree.root
        for bucket in self._at.pop(node).values():
            for place in bucket.values():
                place.node, place.key = root, self._key(place.keys, 0)
                self._enter(place)
                self._stale[root, place.key] = None

    def _rest(self, place: _Place) -> None:
        """Walks on from the place's node as far as the tree goes."""
        place.node, place.length = self._tree.descend(place.node, place.keys)
        place.key = self._key(place.keys, place.node.end)
        self._enter(place)

    def _key(self, tokens: Int32s, at: int) -> ChildKey | None:
        if at + self._tree.page_size > len(tokens):
            return None
        return self._tree.child_key(tokens, at)

    def _enter(self, place: _Place) -> None:
        buckets = self._at.setdefault(place.node, {})
        buckets.setdefault(place.key, {})[place.request.request_id] = place

    def _leave(self, place: _Place) -> None:
        buckets = self._at[place.node]
        bucket = buckets[place.key]
        del bucket[place.request.request_id]
        if not bucket:
            del buckets[place.key]
            if not buckets:
                del self._at[place.node]
