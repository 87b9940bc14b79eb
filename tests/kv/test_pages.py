"""Free list and request table."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.errors import InvariantError
from weft.kv.pages import PageAllocator, ReqToTokenPool, round_up


@pytest.mark.parametrize(
    ("tokens", "page", "slots"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32), (5, 1, 5), (65, 64, 128)]
)
def test_round_up(tokens: int, page: int, slots: int) -> None:
    assert round_up(tokens, page) == slots


@pytest.mark.parametrize("page", [1, 16, 64])
def test_slots_are_whole_pages_and_never_given_twice(page: int) -> None:
    pages = PageAllocator(4 * page + page // 2, page)
    assert pages.capacity == pages.free_slots == 4 * page
    first, second = pages.allocate(3 * page), pages.allocate(page)
    both = np.concatenate([first, second])
    assert sorted(both.tolist()) == list(range(4 * page))
    for slots in (first, second):
        starts = slots.reshape(-1, page)[:, :1]
        assert not (starts % page).any()
        assert np.array_equal(slots.reshape(-1, page), starts + np.arange(page))
    assert pages.free_slots == 0
    assert not pages.free_mask().any()
    pages.free(second)
    assert pages.free_slots == page
    assert np.flatnonzero(pages.free_mask()).tolist() == sorted(second.tolist())
    assert pages.allocate(page).tolist() == second.tolist()


def test_a_fresh_pool_gives_ascending_runs() -> None:
    assert PageAllocator(64, 16).allocate(64).tolist() == list(range(64))


@pytest.mark.parametrize("wanted", [17, 8, 80])
def test_refuses_parts_of_a_page_and_more_than_there_is(wanted: int) -> None:
    pages = PageAllocator(64, 16)
    with pytest.raises(InvariantError):
        pages.allocate(wanted)
    assert pages.free_slots == 64


@pytest.mark.parametrize("page", [1, 16])
def test_double_free_is_caught(page: int) -> None:
    pages = PageAllocator(4 * page, page)
    slots = pages.allocate(2 * page)
    with pytest.raises(InvariantError):
        pages.free(np.concatenate([slots[:page], slots[:page]]))  # twice in one call
    pages.free(slots)
    with pytest.raises(InvariantError):
        pages.free(slots[:page])
    assert pages.free_slots == 4 * page


def test_parts_of_pages_cannot_be_freed() -> None:
    pages = PageAllocator(64, 16)
    slots = pages.allocate(48)
    for bad in (slots[:8], slots[8:24], slots[::-1][:16]):
        with pytest.raises(InvariantError):
            pages.free(bad)
    pages.free(slots[:0])
    assert pages.free_slots == 16


@pytest.mark.parametrize(("capacity", "page"), [(0, 1), (15, 16), (10, 0)])
def test_no_room_for_a_page(capacity: int, page: int) -> None:
    with pytest.raises(ValueError):
        PageAllocator(capacity, page)


def test_request_table_rows() -> None:
    rows = ReqToTokenPool(2, 8)
    assert rows.table.shape == (2, 8)
    taken = [rows.take(), rows.take()]
    assert sorted(taken) == [0, 1]
    with pytest.raises(InvariantError):
        rows.take()
    rows.give_back(taken[0])
    assert rows.free_rows == 1
    for bad in (taken[0], -1, 2):  # not in use, or no row at all
        with pytest.raises(InvariantError):
            rows.give_back(bad)
    assert rows.take() == taken[0]
