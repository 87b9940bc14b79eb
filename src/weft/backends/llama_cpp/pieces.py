"""`HostPieces`: cells of a llama.cpp context that are kept in host memory, and come back."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)


class HostPieces:
    """llama.cpp saves and restores whole sequences, and a restored one replaces what it was; so a piece goes through a
    sequence of its own, `scratch`, that has its cells and nothing else. For the time of a restore a piece takes cells
    besides those of the sequence that gets a part of it.
    """

    def __init__(self, library: Any, context: Any, memory: Any, scratch: int) -> None:
        self._library = library
        self._context = context
        self._memory = memory
        self._scratch = scratch
        self._pieces: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces.values())

    def save(self, piece: int, sequence: int, start: int, end: int) -> None:
        """Copies positions [start, end) of a sequence to host memory."""
        library, scratch = self._library, self._scratch
        library.llama_memory_seq_cp(self._memory, sequence, scratch, start, end)
        try:
            data = np.empty(library.llama_state_seq_get_size(self._context, scratch), dtype=np.uint8)
        except MemoryError:
            logger.error("no memory for KV of %d tokens; whoever wants it back fails", end - start)
        else:
            size = library.llama_state_seq_get_data(self._context, self._pointer(data), data.nbytes, scratch)
            if size == data.nbytes:
                self._pieces[piece] = data
        library.llama_memory_seq_rm(self._memory, scratch, -1, -1)

    def load(self, piece: int, sequence: int, start: int, end: int) -> bool:
        """Gives a sequence the positions [start, end) of a piece; False if they cannot be had."""
        library, scratch, data = self._library, self._scratch, self._pieces.get(piece)
        if data is None:
            return False
        if not library.llama_state_seq_set_data(self._context, self._pointer(data), data.nbytes, scratch):
            library.llama_memory_seq_rm(self._memory, scratch, -1, -1)
            return False
        library.llama_memory_seq_cp(self._memory, scratch, sequence, start, end)
        library.llama_memory_seq_rm(self._memory, scratch, -1, -1)
        return True

    def drop(self, piece: int) -> None:
        self._pieces.pop(piece, None)

    @staticmethod
    def _pointer(data: npt.NDArray[np.uint8]) -> Any:
        return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
