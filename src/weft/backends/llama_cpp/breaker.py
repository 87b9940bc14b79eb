"""Breaks `llama_decode` off from another thread."""

from __future__ import annotations

import ctypes
import threading
from typing import Any


class Breaker:
    """Which steps are to be broken off, and the callback that llama.cpp asks between two operations.

    The callback is the C library's `strlen`, and its argument a string of one character or none: so the answer comes
    from memory, thousands of times a step, without Python and its lock.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self._lock = threading.Lock()
        self._upto = self._running = -1

    def install(self, library: Any, context: Any) -> None:
        """Makes a context listen."""
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
        self._callback = library.ggml_abort_callback(strlen)
        library.llama_set_abort_callback(context, self._callback, ctypes.cast(self._text, ctypes.c_void_p))

    def cancel(self, step: int) -> None:
        """Steps up to this one are to stop; called from any thread."""
        with self._lock:
            self._upto = max(self._upto, step)
            if self._running <= self._upto:
                self._text[0] = b"x"

    def begin(self, step: int) -> bool:
        """This step runs from now on; False if it is not to."""
        with self._lock:
            self._running = step
            self._text[0] = b"\0"
            return step > self._upto
