"""Stop strings: where a text ends, and how much of it may be sent before that is known.

Convention: a text ends at the first character that completes any stop string, as if the model stopped the moment it had
written one. When several are completed by the same character, the longest counts, so that most is cut off. This depends
on the text alone, not on the order of the stop strings nor on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StopUpdate:
    """`text` may be sent now; `matched` is the stop string that ended the text, None while it goes on."""

    text: str
    matched: str | None


@dataclass(frozen=True, slots=True)
class _Automaton:
    """Aho and Corasick's automaton ("Efficient string matching", 1975) over the stop strings.

    A state is a prefix of some stop string: the longest one that the text read so far ends in. `depth` is its length,
    which is just what must be held back; `hit` is the length of the longest stop string it ends in, 0 if none.
    """

    children: list[dict[str, int]]
    fallback: list[int]
    depth: list[int]
    hit: list[int]
    first_char: re.Pattern[str]


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Built once per set of stop strings (clients repeat theirs), in time linear in their total length."""
    children: list[dict[str, int]] = [{}]
    depth, hit = [0], [0]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in children[state]:
                children[state][char] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                hit.append(0)
            state = children[state][char]
        hit[state] = len(stop)
    fallback = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        state = queue.popleft()
        for char, child in children[state].items():
            queue.append(child)
            back = fallback[state]
            while back and char not in children[back]:
                back = fallback[back]
            fallback[child] = children[back].get(char, 0)
        hit[state] = hit[state] or hit[fallback[state]]
    first_char = re.compile("|".join(map(re.escape, children[0])))
    return _Automaton(children, fallback, depth, hit, first_char)


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    Every character is looked at once, whatever the number of stop strings. At most one character less than the longest
    stop string is held back. After a match nothing is emitted any more.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` leaves the stop string itself in the text. An empty stop string is an `InvalidRequestError`."""
        if any(not stop for stop in stops):
            raise InvalidRequestError("stop: a stop string must not be empty", param="stop")
        self.matched: str | None = None
        self._include = include
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopUpdate:
        """The text that may be sent now. Once a stop string was found, every further push gives ("", that string)."""
        if self.matched is not None:
            return StopUpdate("", self.matched)
        if self._automaton is None:
            return StopUpdate(text, None)
        return self._scan(self._automaton, self._held + text, len(self._held))

    def _scan(self, machine: _Automaton, text: str, position: int) -> StopUpdate:
        """Reads `text` from `position`; what stands before it is held text that `self._state` has already read."""
        children, fallback, state = machine.children, machine.fallback, self._state
        while position < len(text):
            if state == 0:
                start = machine.first_char.search(text, position)
                if start is None:
                    break
                position = start.start()
            char = text[position]
            position += 1
            while state and char not in children[state]:
                state = fallback[state]
            state = children[state].get(char, 0)
            if length := machine.hit[state]:
                self.matched = text[position - length : position]
                self._held = ""
                return StopUpdate(text[: position if self._include else position - length], self.matched)
        self._state = state
        sure = len(text) - machine.depth[state]
        self._held = text[sure:]
        return StopUpdate(text[:sure], None)

    def flush(self) -> str:
        """The held text, when the text ended without a stop string; "" after a match or a second time."""
        held, self._held, self._state = self._held, "", 0
        return held
