"""`WholeSequences`: what is kept for models whose state belongs to a whole sequence (recurrent layers).

Such a state cannot be cut, nor can a prompt begin in its middle. So an ended request's sequence is kept as it is, and a
prompt that begins with all of its tokens takes it over and goes on; one at a time, since going on changes the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.plan import Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A sequence's tokens (int32 [n]) and slots (int32 [n]); `owner` is the request that computed it last."""

    sequence: int
    tokens: Int32s
    slots: Int32s
    owner: int

    def __len__(self) -> int:
        return len(self.tokens)


class WholeSequences:
    """The kept ones, the least recently ended first. `tokens` counts all of theirs."""

    def __init__(self) -> None:
        self.tokens = 0
        self._entries: dict[int, Whole] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Whole]:
        return list(self._entries.values())

    def oldest(self) -> Whole | None:
        return next(iter(self._entries.values()), None)

    def match(self, tokens: Int32s) -> Whole | None:
        """The longest one that `tokens` begin with."""
        best: Whole | None = None
        for entry in self._entries.values():
            size = len(entry)
            longer = size <= len(tokens) and size > (0 if best is None else len(best))
            # The last tokens differ soonest, where prompts share a beginning.
            if longer and entry.tokens[-1] == tokens[size - 1] and (entry.tokens == tokens[:size]).all():
                best = entry
        return best

    def add(self, entry: Whole) -> None:
        self._entries[entry.sequence] = entry
        self.tokens += len(entry)

    def remove(self, entry: Whole) -> None:
        del self._entries[entry.sequence]
        self.tokens -= len(entry)
