"""What a process has loaded by the time it serves stays for good: the garbage collector need not look at it again."""

from __future__ import annotations

import gc


def settle() -> None:
    """To be called once everything is loaded. A full collection over torch's objects alone takes some 50 ms."""
    gc.collect()
    gc.freeze()
