"""A `llama_batch` whose arrays are numpy's."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from weft.core.plan import Bools, Int32s


class Batch:
    """Room for `size` tokens of one sequence each. Filling it copies a few kilobytes and calls nothing."""

    def __init__(self, library: Any, size: int) -> None:
        self.size = size
        self._token = np.zeros(size, dtype=np.int32)
        self._pos = np.zeros(size, dtype=np.int32)
        self._sequence = np.zeros(size, dtype=np.int32)
        self._logits = np.zeros(size, dtype=np.int8)
        self._count = np.ones(size, dtype=np.int32)  # sequences of each token
        # llama.cpp wants a pointer to each token's list of sequences: they point into one array.
        self._lists = (self._sequence.ctypes.data + 4 * np.arange(size)).astype(np.uintp)
        int32s = ctypes.POINTER(ctypes.c_int32)
        self._batch = library.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(int32s),
            embd=None,
            pos=self._pos.ctypes.data_as(int32s),
            n_seq_id=self._count.ctypes.data_as(int32s),
            seq_id=self._lists.ctypes.data_as(ctypes.POINTER(int32s)),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, tokens: Int32s, positions: Int32s, sequences: Int32s, outputs: Bools) -> Any:
        """The `llama_batch` with these tokens; all arrays are [n], `outputs` says whose logits are wanted."""
        count = len(tokens)
        self._token[:count] = tokens
        self._pos[:count] = positions
        self._sequence[:count] = sequences
        self._logits[:count] = outputs
        self._batch.n_tokens = count
        return self._batch
