"""What people see of the prefix cache: the heaviest branches, parents first, bounded, and no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.kv.conftest import NewCache, NewRequest
from weft.kv import snapshot as module
from weft.kv.prefix_cache import PrefixCache
from weft.kv.snapshot import snapshot
from weft.kv.whole import Whole


def run(cache: PrefixCache, new_request: NewRequest, tokens: Sequence[int], now_s: float = 0.0) -> Any:
    """A request that computes its whole prompt and shares it; the caller ends it."""
    request = new_request(tokens)
    cache.attach(request, now_s=now_s)
    cache.extend(request, len(tokens), now_s)
    request.cached_len = len(tokens)
    cache.cache_unfinished(request)
    return request


def fill(cache: PrefixCache, new_request: NewRequest, tokens: Sequence[int], now_s: float = 0.0) -> None:
    cache.cache_finished(run(cache, new_request, tokens, now_s))


def check_form(answer: dict[str, Any]) -> None:
    """Ids are places, parents come first, depths and places add up."""
    for place, node in enumerate(answer["nodes"]):
        assert node["id"] == place and node["tokens"] > 0
        parent = node["parent"]
        assert node["depth"] == (1 if parent is None else answer["nodes"][parent]["depth"] + 1)
        assert parent is None or parent < place
    assert answer["free"] + answer["cached"] + answer["active"] == answer["capacity"]


def test_an_empty_cache(new_cache: NewCache) -> None:
    expected = {"capacity": 64, "free": 64, "cached": 0, "active": 0, "nodes": [], "truncated": 0}
    assert snapshot(new_cache(64), 5.0) == expected


def test_a_branching_tree(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(64)
    fill(cache, new_request, [1, 2, 3, 4, 5, 6], 1.0)
    fill(cache, new_request, [1, 2, 9], 2.0)
    fill(cache, new_request, [7] * 20, 3.0)
    cache.lease("alice", np.array([1, 2, 9], dtype=np.int32), 3.0, 60.0)
    held = run(cache, new_request, [7] * 20 + [8], 4.0)
    answer = snapshot(cache, 10.0)
    check_form(answer)
    seen = [(n["parent"], n["tokens"], n["held"]) for n in answer["nodes"]]
    assert seen[:2] == [(None, 20, "request"), (None, 2, "session")]
    assert set(seen[2:]) == {(0, 1, "request"), (1, 4, None), (1, 1, "session")}
    assert answer["truncated"] == 0
    assert (answer["active"], answer["cached"]) == (21, 7)
    idle = {(n["parent"], n["tokens"]): n["last_used_s_ago"] for n in answer["nodes"]}
    assert idle[None, 20] == 6.0 and idle[1, 1] == 8.0
    cache.cache_finished(held)
    assert snapshot(cache, 10.0)["active"] == 0


def test_it_changes_nothing(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(64)
    for start in (1, 2, 3):
        fill(cache, new_request, [start, 5, 6, 7])
    before = [(node, node.last_used, node.locks) for node in cache.tree.nodes()]
    first = snapshot(cache, 1.0)
    assert first == snapshot(cache, 1.0)
    assert [(node, node.last_used, node.locks) for node in cache.tree.nodes()] == before
    cache.check([])


def test_the_heaviest_subtrees_are_shown(
    new_cache: NewCache, new_request: NewRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHOWN", 3)
    cache = new_cache(256)
    fill(cache, new_request, [1] * 10)
    fill(cache, new_request, [2] * 30)
    for end in (1, 2, 3):  # a light node with much below it: 2 + 3 * 12
        fill(cache, new_request, [3, 3] + [100 + end] * 12)
    answer = snapshot(cache, 0.0)
    check_form(answer)
    assert [(n["parent"], n["tokens"]) for n in answer["nodes"]] == [(None, 2), (None, 30), (0, 12)]
    assert answer["truncated"] == 3


def test_the_walk_is_bounded_and_prefers_what_is_new(
    new_cache: NewCache, new_request: NewRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WALKED", 5)
    cache = new_cache(256)
    for first in range(20):
        fill(cache, new_request, [first] * (first + 1))
    answer = snapshot(cache, 0.0)
    check_form(answer)
    assert [n["tokens"] for n in answer["nodes"]] == [20, 19, 18, 17, 16]
    assert answer["truncated"] == 15


def test_at_most_so_many_nodes(new_cache: NewCache, new_request: NewRequest) -> None:
    cache = new_cache(1000)
    for first in range(module.MAX_SHOWN + 40):
        fill(cache, new_request, [first, first])
    answer = snapshot(cache, 0.0)
    assert (len(answer["nodes"]), answer["truncated"]) == (module.MAX_SHOWN, 40)


def test_whole_sequences_are_nodes_too(new_cache: NewCache) -> None:
    cache = new_cache(64)
    for sequence, size in ((0, 3), (1, 7)):
        tokens = np.zeros(size, dtype=np.int32)
        cache.whole.add(Whole(sequence, tokens, cache.pages.allocate(size), owner=sequence))
    answer = snapshot(cache, 0.0)
    check_form(answer)
    assert [(n["tokens"], n["held"], n["last_used_s_ago"]) for n in answer["nodes"]] == [
        (7, None, None),
        (3, None, None),
    ]
