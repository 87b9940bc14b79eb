"""Which beginnings of prompts were cached once: a bounded memory of what was evicted, to tell why a turn missed."""

from __future__ import annotations

import numpy as np

from weft.core.plan import Int32s, UInt64s

_U64 = 2**64


def fingerprint(tokens: Int32s, start: int) -> int:
    """64 bits for tokens at positions from `start` on.

    A sum over positions, so that the fingerprints of two neighbouring runs add up (modulo 2**64) to that of both,
    however a sequence is cut. Each term is splitmix64's finisher (Steele, Lea and Flood, 2014) of position and token.
    """
    return int(np.add.reduce(_terms(tokens, start), dtype=np.uint64))


def suffixes(tokens: Int32s, start: int) -> list[int]:
    """The fingerprints of `tokens[i:]`, at positions from `start` + i on, for all i."""
    sums: list[int] = np.cumsum(_terms(tokens, start)[::-1], dtype=np.uint64)[::-1].tolist()
    return sums


def _terms(tokens: Int32s, start: int) -> UInt64s:
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    # By way of uint32: the keys of media are negative, and their sign must not cover the position.
    z = (positions << np.uint64(32)) | tokens.astype(np.uint32).astype(np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap without a warning
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    terms: UInt64s = z ^ (z >> np.uint64(31))
    return terms


def joined(first: int, second: int) -> int:
    """The fingerprint of two neighbouring runs."""
    return (first + second) % _U64


def without(whole: int, end: int) -> int:
    """The fingerprint of a run without its end."""
    return (whole - end) % _U64


class EvictedPrefixes:
    """The last `size` places where something was cut off: after which prefix, and with which page it went on."""

    def __init__(self, size: int = 65536) -> None:
        self._size = size
        self._places: dict[tuple[int, int | bytes], None] = {}

    def __contains__(self, place: object) -> bool:
        return place in self._places

    def add(self, prefix: int, next_page: int | bytes) -> None:
        """What followed a prefix with this fingerprint, beginning with this page, is gone."""
        self._places.pop((prefix, next_page), None)
        self._places[prefix, next_page] = None
        if len(self._places) > self._size:
            del self._places[next(iter(self._places))]
