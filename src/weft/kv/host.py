"""`HostTier`: what the engine's cache has no room for, kept in the host's memory, for engines that store KV under
sequence ids.

What leaves the radix tree is saved as pieces: each is a run of at most `piece_tokens` tokens with the whole path of
tokens down to its end, so that a prompt is compared with all that its KV depends on. A prompt that goes on where the
tree ends gets its cells back from the pieces that follow one another from there. A piece stays when it was brought
back: going out again then costs nothing. The tier decides; the engine is told by `KvOp`s, in order with all others.

Invariants: no piece without tokens; pieces hold at most `capacity` tokens, the least recently used go first; an end of
a path goes before what it follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.errors import InvariantError
from weft.core.plan import PIECE_TOKENS, Int32s
from weft.kv.fingerprint import EvictedPrefixes, fingerprint, joined, suffixes, without
from weft.kv.radix_tree import Node
from weft.kv.sequences import Sequences


@dataclass(slots=True, eq=False)
class Piece:
    """KV of `path[start:end]`, kept by the engine under `number`; `path` is int32, shared by pieces of one branch."""

    number: int
    start: int
    end: int
    path: Int32s
    key: tuple[int, int]
    pinned: int = 0

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [start, end) of a piece, wanted by a prompt."""

    piece: Piece
    start: int
    end: int


class HostTier:
    """See the module's docstring.

    Args:
        sequences: which sequence covers a node, and what tells the engine.
        evicted: the tree's, to remember what was forgotten here.
        capacity: tokens.
        piece_tokens: length of a piece.

    Attributes:
        tokens: held now. demoted_total, restored_total, dropped_total: tokens that went out, came back, were forgotten.
    """

    def __init__(
        self, sequences: Sequences, evicted: EvictedPrefixes, capacity: int, piece_tokens: int = PIECE_TOKENS
    ) -> None:
        self.capacity = capacity
        self.tokens = 0
        self.demoted_total = self.restored_total = self.dropped_total = 0
        self._sequences = sequences
        self._evicted = evicted
        self._piece_tokens = piece_tokens
        self._pieces: dict[int, Piece] = {}  # the least recently used first
        self._index: dict[tuple[int, int], list[Piece]] = {}  # by start and fingerprint of the path before it
        self._next = 0

    # ---- going out --------------------------------------------------------------------------------------------

    def demote(self, node: Node, start: int) -> None:
        """The tokens of a leaf from position `start` on are about to leave the tree; saves what is not here yet."""
        path = _path(node)
        held = self.find(path, start, without(node.prefix, fingerprint(path[start:], start)))
        at = held[-1].end if held else start
        starts = range(at, node.end, self._piece_tokens)
        source = self._sequences.cover(node)
        prefix = node.prefix
        for first in reversed(starts):  # the end is the first to be forgotten
            last = min(first + self._piece_tokens, node.end)
            prefix = without(prefix, fingerprint(path[first:last], first))
            self._save(Piece(self._next, first, last, path, (first, prefix)), source)
        self._touch(held)
        self.trim()

    def _save(self, piece: Piece, source: int) -> None:
        self._next += 1
        self._pieces[piece.number] = piece
        self._index.setdefault(piece.key, []).append(piece)
        self.tokens += len(piece)
        self.demoted_total += len(piece)
        self._sequences.save(piece.number, source, piece.start, piece.end)

    # ---- coming back ------------------------------------------------------------------------------------------

    def find(self, tokens: Int32s, start: int, prefix: int) -> list[Part]:
        """What is here of `tokens` from position `start` on, without a gap; `prefix` is the fingerprint before it."""
        parts: list[Part] = []
        proven: dict[int, int] = {}  # id of a path -> how much of it is known to agree with the tokens
        while self._index and start < len(tokens):
            part = self._next_part(tokens, start, prefix, proven)
            if part is None:
                break
            parts.append(part)
            prefix = joined(prefix, fingerprint(tokens[start : part.end], start))
            start = part.end
        return parts

    def _next_part(self, tokens: Int32s, at: int, prefix: int, proven: dict[int, int]) -> Part | None:
        """The piece that covers position `at`, best one that begins there."""
        for key in self._keys_near(tokens, at, prefix):
            ends = [(self._agreement(piece, tokens, proven), piece) for piece in self._index.get(key, ())]
            end, piece = max(ends, key=lambda one: one[0], default=(0, None))
            if piece is not None and end > at:
                return Part(piece, at, end)
        return None

    def _keys_near(self, tokens: Int32s, at: int, prefix: int) -> Iterator[tuple[int, int]]:
        """Under what a piece that covers `at` may be found, the latest start first."""
        yield at, prefix
        lowest = max(0, at - self._piece_tokens + 1)
        if lowest < at:
            before = suffixes(tokens[lowest:at], lowest)
            for start in range(at - 1, lowest - 1, -1):
                yield start, without(prefix, before[start - lowest])

    def _agreement(self, piece: Piece, tokens: Int32s, proven: dict[int, int]) -> int:
        """How far the piece's path agrees with the tokens, up to the piece's end; 0 if not even up to its start.

        Fingerprints can be made to collide; somebody else's KV must never be taken for one's own.
        """
        size = min(piece.end, len(tokens))
        known = min(proven.get(id(piece.path), 0), size)
        differs = piece.path[known:size] != tokens[known:size]
        end = known + int(differs.argmax()) if differs.any() else size
        proven[id(piece.path)] = end
        return end if end > piece.start else 0

    def pin(self, parts: Sequence[Part], by: int) -> None:
        """Keeps pieces (`by` 1) until they are let go (`by` -1)."""
        for part in parts:
            part.piece.pinned += by

    def restore(self, parts: Sequence[Part], sequence: int) -> None:
        """Brings parts back as cells of a sequence that ends where they begin."""
        for part in parts:
            if part.piece.number not in self._pieces:
                raise InvariantError(f"piece {part.piece.number} is gone")
            self._sequences.load(part.piece.number, sequence, part.start, part.end)
            self.restored_total += part.end - part.start
        self._touch(parts)

    def forget(self, parts: Sequence[Part]) -> None:
        """Drops the pieces of these parts, as far as they are still here."""
        for part in parts:
            if part.piece.number in self._pieces:
                self._drop(part.piece)

    # ---- all of it --------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets everything."""
        for piece in list(self._pieces.values()):
            self._drop(piece)

    def check(self) -> None:
        """Raises InvariantError where the books do not add up."""
        held = sum(len(piece) for piece in self._pieces.values())
        indexed = sum(len(pieces) for pieces in self._index.values())
        if held != self.tokens or indexed != len(self._pieces) or any(not len(p) for p in self._pieces.values()):
            raise InvariantError(f"the host tier counts {self.tokens} tokens, holds {held} in {indexed} pieces")
        if self.tokens > self.capacity or any(piece.pinned for piece in self._pieces.values()):
            raise InvariantError(f"the host tier holds {self.tokens} tokens of {self.capacity}, or keeps some too long")

    # ---- insides ----------------------------------------------------------------------------------------------

    def _touch(self, parts: Sequence[Part]) -> None:
        for part in reversed(parts):
            self._pieces[part.piece.number] = self._pieces.pop(part.piece.number)

    def trim(self) -> None:
        """Forgets what is beyond the capacity, as far as it is not pinned."""
        while self.tokens > self.capacity:
            oldest = next((piece for piece in self._pieces.values() if not piece.pinned), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, piece: Piece) -> None:
        del self._pieces[piece.number]
        self._evicted.add(piece.key[1], int(piece.path[piece.start]))
        same = self._index[piece.key]
        same.remove(piece)
        if not same:
            del self._index[piece.key]
        self.tokens -= len(piece)
        self.dropped_total += len(piece)
        self._sequences.drop(piece.number)


def _path(node: Node) -> Int32s:
    """int32 [node.end], all tokens from the root to the node's end."""
    keys: list[Int32s] = []
    step: Node | None = node
    while step is not None:
        keys.append(step.key)
        step = step.parent
    return np.concatenate(keys[::-1])
