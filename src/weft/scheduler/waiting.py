"""`WaitingLine`: requests that wait, in the order in which they are looked at.

Policies: "fcfs" by arrival; "lpm" longest cached prefix first and "dfs-weight" branch by branch of the tree, the branch
that most wait for first (both after SGLang); "lof" longest output first; "random" in an order fixed by the seed. With
`limits.priority` the requests' own priority comes first. Equal ones go by arrival, then by id.

Nobody starves: every `AGEING`-th place goes to whoever has waited longest, whatever its priority and its prefix. So a
request with n older ones in line is taken after at most `AGEING * (n + 1)` others.

The order is kept, not computed: a change of the tree moves the requests that it concerns, so that thousands may wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, ValuesView

from weft.core.request import Request
from weft.kv.radix_tree import Node, RadixTree
from weft.scheduler.limits import Limits
from weft.scheduler.tracker import PrefixTracker

AGEING = 8

_MANY = 64  # so many changes at once are sorted anew rather than one by one

_U64 = 2**64

_Key = tuple[int, int, float, int]
_Age = tuple[float, int]


class WaitingLine:
    """See the module's docstring.

    Args:
        limits: policy and whether priorities count.
        tree: the prefix cache's tree.
        seed: fixes the order of "random".
    """

    def __init__(self, limits: Limits, tree: RadixTree, seed: int = 0) -> None:
        self._limits = limits
        self._seed = seed
        self._tracker = PrefixTracker(tree)
        self._requests: dict[int, Request] = {}
        self._keys: dict[int, _Key] = {}
        self._sorted: list[_Key] = []
        self._ages: list[_Age] = []
        self._taken = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def get(self, request_id: int) -> Request | None:
        return self._requests.get(request_id)

    def values(self) -> ValuesView[Request]:
        """In the order of joining."""
        return self._requests.values()

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens over the whole line that are not cached."""
        self._refresh()
        return self._tracker.uncached_tokens

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        key = self._key(request, self._tracker.add(request))
        self._keys[request.request_id] = key
        insort(self._sorted, key)
        insort(self._ages, (request.arrival_s, request.request_id))

    def remove(self, request: Request) -> None:
        """It waits no longer, for whatever reason."""
        del self._requests[request.request_id]
        _discard(self._sorted, self._keys.pop(request.request_id))
        _discard(self._ages, (request.arrival_s, request.request_id))
        self._tracker.remove(request)

    def take(self, request: Request) -> None:
        """Removes a request because its turn has come."""
        self.remove(request)
        self._taken += 1

    def ordered(self) -> Iterator[Request]:
        """Everybody, best first, with the places of the longest waiting in between; the line may shrink meanwhile."""
        self._refresh()
        best, oldest = iter(self._best()), iter([request_id for _, request_id in self._ages])
        seen: dict[int, None] = {}
        for place in range(self._taken + 1, self._taken + 1 + len(self._requests)):
            source = oldest if place % AGEING == 0 else best
            request_id = next((i for i in source if i not in seen and i in self._requests), None)
            if request_id is None:
                return
            seen[request_id] = None
            yield self._requests[request_id]

    def worst(self) -> Request:
        """Of the lowest priority, the last to come."""
        return max(self._requests.values(), key=lambda r: (r.priority, r.arrival_s, r.request_id))

    # ---- insides ----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        changed = self._tracker.refresh()
        if not changed or self._limits.policy != "lpm":
            return
        for request in changed:
            if len(changed) <= _MANY:
                _discard(self._sorted, self._keys[request.request_id])
            key = self._keys[request.request_id] = self._key(request, self._tracker.cached(request))
            if len(changed) <= _MANY:
                insort(self._sorted, key)
        if len(changed) > _MANY:
            self._sorted = sorted(self._keys.values())

    def _key(self, request: Request, cached: int) -> _Key:
        rank = request.priority if self._limits.priority else 0
        match self._limits.policy:
            case "lpm":
                own = -cached
            case "lof":
                own = request.device_len - request.max_device_len
            case "random":
                own = mix(self._seed, request.request_id)
            case _:
                own = 0
        return rank, own, request.arrival_s, request.request_id

    def _best(self) -> Iterable[int]:
        if self._limits.policy != "dfs-weight":
            return [key[3] for key in self._sorted]
        order = [request.request_id for request in self._branch_by_branch()]
        if self._limits.priority:
            order.sort(key=lambda request_id: self._requests[request_id].priority)
        return order

    def _branch_by_branch(self) -> Iterator[Request]:
        """Depth first through the part of the tree that somebody waits for."""
        resting = dict(self._tracker.branches())
        weights: dict[Node, int] = {}
        children: dict[Node, list[Node]] = {}
        for node, requests in resting.items():
            step: Node | None = node
            while step is not None:
                if step not in weights:
                    weights[step] = 0
                    if step.parent is not None:
                        children.setdefault(step.parent, []).append(step)
                weights[step] += len(requests)
                step = step.parent
        # A node comes up twice: first its children, the heaviest first, then the requests that rest at it.
        stack = [(node, False) for node in weights if node.parent is None]
        while stack:
            node, visited = stack.pop()
            below = children.get(node)
            if visited or not below:
                yield from sorted(resting.get(node, ()), key=lambda r: (r.arrival_s, r.request_id))
                continue
            stack.append((node, True))
            stack.extend((child, False) for child in sorted(below, key=weights.__getitem__))


def _discard(line: list[_Key] | list[_Age], key: _Key | _Age) -> None:
    del line[bisect_left(line, key)]


def mix(seed: int, number: int) -> int:
    """A 64-bit number from two, after splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) % _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % _U64
    return z ^ (z >> 31)
