"""Standard input as the tie to the process that started this one: a line of settings, then silence until its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def settings_line() -> bytes | None:
    """The first line, waited for; None where the input closes before its end."""
    line = bytearray()
    while not line.endswith(b"\n"):  # byte by byte, so that no buffer swallows the end of the pipe
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    return bytes(line)


def when_it_ends(do: Callable[[], None]) -> None:
    """Calls `do`, in a thread of its own, once the parent is gone or wants an end: the input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        do()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
