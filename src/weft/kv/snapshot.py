"""`snapshot`: the prefix cache as people look at it. Numbers only: no tokens, for they are users' words.

It is asked for while requests run, so its work is bounded: at most `MAX_WALKED` nodes are looked at, level by level,
and at most `MAX_SHOWN` told. Nothing in the cache changes by it.
"""

from __future__ import annotations

import heapq
from typing import Any

from weft.kv.prefix_cache import PrefixCache
from weft.kv.radix_tree import Node

MAX_SHOWN = 300
MAX_WALKED = 4096
"""Looking at so many nodes takes some 2 ms."""


def snapshot(cache: PrefixCache, now_s: float) -> dict[str, Any]:
    """The JSON of `GET /v1/cache`: the heaviest branches of the tree, a parent before its children.

    A node's `id` is its place in this answer and nothing else. `depth`: nodes from the root down to it, itself counted.
    `last_used_s_ago`: since anything was of use that the same request computed. `truncated`: nodes that are not told.
    Where whole sequences are kept instead of a tree, each is a node.
    """
    counts, nodes = cache.counts(), _tree(cache, now_s)
    for whole in sorted(cache.whole.entries(), key=len, reverse=True)[: MAX_SHOWN - len(nodes)]:
        place = {"id": len(nodes), "parent": None, "tokens": len(whole), "held": None, "depth": 1}
        nodes.append(place | {"last_used_s_ago": _idle_s(cache, whole.owner, now_s)})
    return {
        "capacity": counts.capacity,
        "free": counts.free,
        "cached": counts.cached,
        "active": counts.active,
        "nodes": nodes,
        "truncated": cache.tree.num_nodes + len(cache.whole) - len(nodes),
    }


def _tree(cache: PrefixCache, now_s: float) -> list[dict[str, Any]]:
    ids: dict[Node, int] = {}
    told: list[dict[str, Any]] = []
    for node in _heaviest(cache.tree.root):
        ids[node] = len(told)
        parent = None if node.parent is None else ids.get(node.parent)  # the root is not told
        told.append(
            {
                "id": ids[node],
                "parent": parent,
                "tokens": len(node),
                "held": "request" if node.locks else "session" if node.leases else None,
                "depth": 1 if parent is None else told[parent]["depth"] + 1,
                "last_used_s_ago": _idle_s(cache, node.owner, now_s),
            }
        )
    return told


def _idle_s(cache: PrefixCache, owner: int, now_s: float) -> float | None:
    entry = cache.ledger.entry(owner)
    return None if entry is None else round(max(0.0, now_s - entry.last_used_s), 3)


def _heaviest(root: Node) -> list[Node]:
    """At most `MAX_SHOWN` nodes below `root`: next is always the one with the heaviest subtree that can be had."""
    weights = _weights(root)
    shown: list[Node] = []
    heap: list[tuple[int, int, Node]] = []
    serial = 0  # of equal weight: first come, first shown, and nodes are never compared
    opened = root
    while len(shown) < MAX_SHOWN:
        for child in opened.children.values():
            if child in weights:
                serial += 1
                heapq.heappush(heap, (-weights[child], serial, child))
        if not heap:
            break
        opened = heapq.heappop(heap)[2]
        shown.append(opened)
    return shown


def _weights(root: Node) -> dict[Node, int]:
    """Tokens of the subtree of each node that is looked at, as far as it is looked at; of too many, the newest."""
    walked = [root]
    for node in walked:  # grows while it is read: level by level
        room = MAX_WALKED + 1 - len(walked)
        if room <= 0:
            break
        children = list(node.children.values())
        walked += children[max(0, len(children) - room) :]
    weights = {node: len(node) for node in walked}
    for node in reversed(walked):
        if node.parent is not None:
            weights[node.parent] += weights[node]
    return weights
