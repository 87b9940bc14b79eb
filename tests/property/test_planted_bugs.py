"""The random walk must be able to fail: each bug planted here, of the kinds that public servers had, is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.property.walk import random_walk
from weft.core.request import Request
from weft.kv.pages import PageAllocator
from weft.kv.prefix_cache import PrefixCache, PrefixHandle
from weft.kv.radix_tree import Node, RadixTree

Patch = Callable[[pytest.MonkeyPatch], None]


def _double_free(patch: pytest.MonkeyPatch) -> None:
    """A finished request frees its whole row, the part that the tree has taken over included."""
    original = PrefixCache.cache_finished

    def buggy(self: PrefixCache, request: Request, *, keep: bool = True) -> None:
        row = (
            self.rows.table[request.row, request.prefix.length : request.allocated_len].copy() if request.prefix else []
        )
        original(self, request, keep=keep)
        self.pages.free(np.asarray(row, dtype=np.int32))

    patch.setattr(PrefixCache, "cache_finished", buggy)


def _silent_double_free(patch: pytest.MonkeyPatch) -> None:
    """The same with an allocator that does not notice."""
    _double_free(patch)

    def careless(self: PageAllocator, slots: Any) -> None:
        pages = slots[:: self.page_size] // self.page_size
        self._is_free[pages] = True
        pages = pages[: len(self._stack) - self._top]
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    patch.setattr(PageAllocator, "free", careless)


def _missing_unlock(patch: pytest.MonkeyPatch) -> None:
    """`cache_unfinished` locks the longer prefix and forgets the old one."""
    original = PrefixCache.cache_unfinished

    def buggy(self: PrefixCache, request: Request) -> None:
        held: PrefixHandle = request.prefix
        original(self, request)
        if request.prefix is not held:
            self.tree.lock(held.node)

    patch.setattr(PrefixCache, "cache_unfinished", buggy)


def _wrong_split(patch: pytest.MonkeyPatch) -> None:
    """The lower part of a split edge keeps the slots of the upper part."""
    original = RadixTree._split

    def buggy(self: RadixTree, node: Node, at: int) -> Node:
        slots = node.slots
        upper = original(self, node, at)
        node.slots = slots[: len(node.key)]
        return upper

    patch.setattr(RadixTree, "_split", buggy)


def _split_loses_locks(patch: pytest.MonkeyPatch) -> None:
    """The new upper part of a split edge does not inherit the locks."""
    original = RadixTree._split

    def buggy(self: RadixTree, node: Node, at: int) -> Node:
        upper = original(self, node, at)
        upper.locks = 0
        return upper

    patch.setattr(RadixTree, "_split", buggy)


def _split_loses_leases(patch: pytest.MonkeyPatch) -> None:
    """The new upper part of a split edge is not leased, although the lower one is."""
    original = RadixTree._split

    def buggy(self: RadixTree, node: Node, at: int) -> Node:
        upper = original(self, node, at)
        upper.leases = 0
        return upper

    patch.setattr(RadixTree, "_split", buggy)


def _lease_kept_forever(patch: pytest.MonkeyPatch) -> None:
    """The end of a lease is forgotten in the tree."""
    patch.setattr(RadixTree, "end_lease", lambda self, node: None)


def _no_remap(patch: pytest.MonkeyPatch) -> None:
    """Two prompts computed the same prefix; the loser's slots are freed, but its table still points at them."""
    original = PrefixCache.cache_unfinished

    def buggy(self: PrefixCache, request: Request) -> None:
        row = self.rows.table[request.row].copy()
        original(self, request)
        self.rows.table[request.row] = row

    patch.setattr(PrefixCache, "cache_unfinished", buggy)


def _keys_without_adapter(patch: pytest.MonkeyPatch) -> None:
    """What one adapter has computed is found by another."""
    patch.setattr(Request, "keys", lambda self, start, end: self._tokens[start:end])


@pytest.mark.parametrize(
    "plant",
    [
        _double_free,
        _silent_double_free,
        _missing_unlock,
        _wrong_split,
        _split_loses_locks,
        _split_loses_leases,
        _lease_kept_forever,
        _no_remap,
        _keys_without_adapter,
    ],
)
def test_planted_bug_is_caught(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((RuntimeError, AssertionError, ValueError, IndexError)):
        for seed in range(20):
            random_walk(seed, 120)
