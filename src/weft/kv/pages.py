"""Free KV slots, handed out in whole pages, and the table that says where each token's KV lies."""

from __future__ import annotations

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import Int32s


def round_up(tokens: int, page_size: int) -> int:
    """Tokens rounded up to whole pages; whoever allocates and whoever reserves must use this one function."""
    return -(-tokens // page_size) * page_size


class PageAllocator:
    """The free list. A page is `page_size` neighbouring slots that start at a multiple of `page_size`.

    Invariant: a slot is in the free list exactly when nobody owns it; a double free is caught at once, because a bitmap
    of free pages is kept beside the list.
    """

    def __init__(self, capacity: int, page_size: int = 1) -> None:
        if page_size < 1 or capacity < page_size:
            raise ValueError(f"no room for a single page: capacity {capacity} slots, page size {page_size}")
        self.page_size = page_size
        self.num_pages = capacity // page_size
        self.capacity = self.num_pages * page_size
        # A stack with the lowest page on top, so that a fresh pool hands out ascending runs (fast to read).
        self._stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._top = self.num_pages
        self._is_free = np.ones(self.num_pages, dtype=np.bool_)
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def free_slots(self) -> int:
        return self._top * self.page_size

    def allocate(self, num_slots: int) -> Int32s:
        """int32 [num_slots], slots of whole pages; `num_slots` is a multiple of the page size, at most `free_slots`."""
        num_pages, rest = divmod(num_slots, self.page_size)
        if rest or num_pages > self._top:
            raise InvariantError(f"cannot allocate {num_slots} slots: {self.free_slots} free, page {self.page_size}")
        pages = self._stack[self._top - num_pages : self._top][::-1]
        self._top -= num_pages
        self._is_free[pages] = False
        if self.page_size == 1:
            return pages.copy()
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1).astype(np.int32, copy=False)

    def free(self, slots: Int32s) -> None:
        """Takes whole pages back; raises InvariantError for parts of a page and for what is free already."""
        if len(slots) == 0:
            return
        if len(slots) % self.page_size:
            raise InvariantError(f"{len(slots)} slots are not whole pages of {self.page_size}")
        pages = slots[:: self.page_size] // self.page_size
        if self.page_size > 1 and not np.array_equal(
            slots.reshape(-1, self.page_size), pages[:, None] * self.page_size + self._offsets
        ):
            raise InvariantError(f"slots {slots[:8]}... are not whole pages of {self.page_size}")
        if self._is_free[pages].any() or len(np.unique(pages)) != len(pages):
            raise InvariantError(f"double free among slots {slots[:8]}...")
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)

    def free_mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool [capacity], for checks."""
        if int(self._is_free.sum()) != self._top or not self._is_free[self._stack[: self._top]].all():
            raise InvariantError("the free list and its bitmap disagree")
        return np.repeat(self._is_free, self.page_size)


class ReqToTokenPool:
    """Maps (row, position) to slot; one row per live request that owns KV.

    `table` is int32 [max_rows, max_len]; entries beyond what a row has allocated mean nothing.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.table = np.zeros((max_rows, max_len), dtype=np.int32)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._used = np.zeros(max_rows, dtype=np.bool_)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take(self) -> int:
        if not self._free_rows:
            raise InvariantError("no free row in the request table")
        row = self._free_rows.pop()
        self._used[row] = True
        return row

    def give_back(self, row: int) -> None:
        if not 0 <= row < len(self._used) or not self._used[row]:
            raise InvariantError(f"row {row} is not in use")
        self._used[row] = False
        self._free_rows.append(row)
