"""Match, split, insert, lock, evict; in tokens and in pages."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from weft.core.errors import InvariantError
from weft.core.plan import Int32s
from weft.kv.radix_tree import RadixTree

PAGES = pytest.mark.parametrize("page", [1, 16, 64])


def run(*pages: int, page: int) -> Int32s:
    """Tokens of whole pages; page k is full of k."""
    return np.repeat(np.array(pages, dtype=np.int32), page)


def slots_for(tokens: Int32s, first: int) -> Int32s:
    return np.arange(first, first + len(tokens), dtype=np.int32)


def put(tree: RadixTree, *pages: int, first: int) -> Int32s:
    """Inserts a path whose slots count up from `first`; returns its tokens."""
    tokens = run(*pages, page=tree.page_size)
    tree.insert(tokens, slots_for(tokens, first))
    tree.check()
    return tokens


@PAGES
def test_match_in_an_empty_tree(page: int) -> None:
    tree = RadixTree(page)
    match = tree.match(run(1, 2, page=page))
    assert (match.length, match.node, len(match.slots)) == (0, tree.root, 0)


@PAGES
def test_match_gives_the_slots_of_the_longest_prefix(page: int) -> None:
    tree = RadixTree(page)
    put(tree, 1, 2, 3, 4, first=0)
    for wanted, pages in ((4, (1, 2, 3, 4, 5)), (2, (1, 2, 9)), (0, (9, 1, 2)), (3, (1, 2, 3))):
        tokens = run(*pages, page=page)
        assert tree.peek(tokens) == wanted * page
        match = tree.match(tokens)
        assert match.length == wanted * page
        assert match.slots.tolist() == list(range(wanted * page))
        tree.check()


@PAGES
def test_peek_changes_nothing(page: int) -> None:
    tree = RadixTree(page)
    put(tree, 1, 2, 3, first=0)
    tree.peek(run(1, 9, page=page))
    assert len(list(tree.nodes())) == 1


@PAGES
def test_match_splits_where_it_ends(page: int) -> None:
    tree = RadixTree(page)
    put(tree, 1, 2, 3, first=0)
    match = tree.match(run(1, 2, page=page))
    assert sorted(len(node) for node in tree.nodes()) == [page, 2 * page]
    assert match.node.slots.tolist() == list(range(2 * page))
    assert tree.match(run(1, 2, 3, page=page)).slots.tolist() == list(range(3 * page))


@pytest.mark.parametrize("page", [16, 64])
def test_parts_of_a_page_do_not_match(page: int) -> None:
    tree = RadixTree(page)
    tokens = put(tree, 1, 2, first=0)
    assert tree.match(tokens[: page + page // 2]).length == page
    assert tree.match(tokens[: page - 1]).length == 0
    other = tokens.copy()
    other[page + 3] = 7  # the second page differs inside
    assert tree.peek(other) == page
    with pytest.raises(InvariantError):
        tree.insert(tokens[: page + 1], slots_for(tokens[: page + 1], 100))


@PAGES
def test_insert_keeps_the_slots_that_were_there(page: int) -> None:
    tree = RadixTree(page)
    put(tree, 1, 2, first=0)
    tokens = run(1, 2, 3, page=page)
    assert tree.insert(tokens, slots_for(tokens, 1000)).length == 2 * page
    assert tree.match(tokens).slots.tolist() == [*range(2 * page), *range(1000 + 2 * page, 1000 + 3 * page)]
    assert tree.insert(tokens, slots_for(tokens, 5000)).length == 3 * page
    assert tree.unlocked_tokens == 3 * page
    tree.check()


def test_insert_copies_its_arguments() -> None:
    tree = RadixTree()
    tokens = run(1, 2, 3, page=1)
    slots = slots_for(tokens, 0)
    tree.insert(tokens, slots)
    tokens[:], slots[:] = 9, 9
    assert tree.match(run(1, 2, 3, page=1)).slots.tolist() == [0, 1, 2]


@PAGES
def test_lock_protects_the_path_and_unlock_gives_it_back(page: int) -> None:
    tree = RadixTree(page)
    put(tree, 1, 2, 3, first=0)
    put(tree, 1, 8, first=100 * page)
    held = tree.match(run(1, 2, page=page)).node
    tree.lock(held)
    tree.lock(held)
    assert (tree.locked_tokens, tree.unlocked_tokens) == (2 * page, 2 * page)
    assert len(tree.evict(10**6).slots) == 2 * page  # pages 3 and 8
    assert tree.peek(run(1, 2, 3, page=page)) == 2 * page
    tree.unlock(held)
    assert len(tree.evict(10**6).slots) == 0
    tree.unlock(held)
    tree.check()
    assert len(tree.evict(10**6).slots) == 2 * page
    assert (tree.locked_tokens, tree.unlocked_tokens) == (0, 0)
    with pytest.raises(InvariantError):
        tree.unlock(held)


def test_a_split_edge_stays_locked_on_both_sides() -> None:
    tree = RadixTree()
    held = tree.match(put(tree, 1, 2, 3, first=0)).node
    tree.lock(held)
    tree.match(run(1, 7, page=1))
    tree.check()
    assert tree.locked_tokens == 3
    tree.unlock(held)
    tree.check()
    assert tree.unlocked_tokens == 3


@PAGES
def test_least_recently_used_goes_first(page: int) -> None:
    tree = RadixTree(page)
    for name in (1, 2, 3, 4):
        put(tree, name, first=name * page)
    tree.match(run(1, page=page))  # 1 and 3 are used again
    tree.match(run(3, page=page))
    gone = [int(tree.evict(1).slots[0]) // page for _ in range(4)]
    assert gone == [2, 4, 1, 3]


def test_held_until_now_is_used_until_now() -> None:
    tree = RadixTree()
    long_held = tree.match(put(tree, 1, first=10)).node
    tree.lock(long_held)
    put(tree, 2, first=20)
    tree.unlock(long_held)
    assert tree.evict(1).slots.tolist() == [20]
    assert tree.evict(1).slots.tolist() == [10]


@PAGES
def test_children_go_before_their_parent(page: int) -> None:
    tree = RadixTree(page)
    put(tree, 1, 2, first=0)
    put(tree, 1, 3, first=10 * page)
    put(tree, 9, first=20 * page)
    order = [int(tree.evict(1).slots[0]) // page for _ in range(4)]
    # The common page 1 is as young as its younger child, so it outlives 2 and 3, and goes before 9.
    assert order == [1, 11, 0, 20]
    assert len(tree.evict(1).slots) == 0
    assert list(tree.nodes()) == []


def test_evict_takes_no_more_nodes_than_it_must() -> None:
    tree = RadixTree()
    for name in range(10):
        tokens = np.full(5, name, dtype=np.int32)
        tree.insert(tokens, slots_for(tokens, 5 * name))
    assert len(tree.evict(0).slots) == 0
    assert len(tree.evict(6).slots) == 10  # two nodes of five
    assert tree.unlocked_tokens == 40


def test_a_short_common_beginning_does_not_keep_long_prompts_in_memory() -> None:
    tree = RadixTree()
    length, rounds = 50_000, 20

    def fill(start: int) -> None:
        for k in range(start, start + rounds):
            tokens = np.full(length, k, dtype=np.int32)
            tree.insert(tokens, slots_for(tokens, 0))
            tree.lock(tree.match(tokens[:1]).node)  # somebody holds the first token only
            tree.evict(length - 1)

    tracemalloc.start()
    try:
        fill(0)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert tree.locked_tokens == rounds
    assert kept_bytes < rounds * length  # as views of the prompts, they would keep eight bytes a token
