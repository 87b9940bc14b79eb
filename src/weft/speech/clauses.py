"""Cuts text that comes piece by piece into clauses, so that the first of them can be spoken early.

Invariants: all clauses together are the text that came; where it is cut does not depend on the pieces in which it came;
no clause is empty, or longer than `LONGEST` characters. A cut lies before a character, so it is known when that comes.
"""

from __future__ import annotations

import re

LONGEST = 200
"""Characters; a text without any punctuation is cut at the last blank before this."""

SHORTEST = 8
"""Units that a sentence has at least, and so has the first clause; what is shorter goes with the next one."""

SHORTEST_CLAUSE = 40
"""Units of a part of a sentence: short ones one by one would lose the sentence's melody."""

_WIDE_UNITS = 3  # a Chinese character is about as long to say as three letters
_SENTENCE, _CLAUSE = ".!?…", ",;:—"
_WIDE_SENTENCE, _WIDE_CLAUSE = "。！？", "，；：、"  # no blank follows them
_CLOSERS = "\"')]}»”’」』）】》"
_NOT_FIRST = frozenset(_SENTENCE + _CLAUSE + _WIDE_SENTENCE + _WIDE_CLAUSE + _CLOSERS)
_ENDS_IN_NUMBER = re.compile(r"[\d.,]+\Z")


class ClauseCutter:
    """The clauses of one text."""

    def __init__(self) -> None:
        self._text = ""
        self._units = 0
        self._first = True

    def push(self, text: str) -> list[str]:
        """The clauses that are complete now."""
        clauses = []
        for char in text:
            cut = self._cut_before(char)
            if cut:
                clauses.append(self._text[:cut])
                self._text = self._text[cut:]
                self._units = sum(map(_units, self._text))
                self._first = False
            self._text += char
            self._units += _units(char)
        return clauses

    def finish(self) -> list[str]:
        """What is left at the end of the text: one clause or none."""
        rest, self._text, self._units = self._text, "", 0
        return [rest] if rest else []

    def _cut_before(self, char: str) -> int:
        """Where to cut what is there, when `char` follows; 0: nowhere."""
        if not self._text:
            return 0
        shortest = _shortest_before(self._text, char)
        if shortest is not None and self._units >= (SHORTEST if self._first else shortest):
            return len(self._text)
        return _forced_cut(self._text, char) if len(self._text) >= LONGEST else 0


def _units(char: str) -> int:
    return _WIDE_UNITS if char >= "\u2e80" else 1


def _shortest_before(text: str, char: str) -> int | None:
    """How many units make `text` a clause of its own if it may end before `char`; None: it may not."""
    if char.isspace():  # blanks go with what is before them
        return None
    last = text[-1]
    blank = last.isspace()
    if not blank and (last not in _NOT_FIRST or char in _NOT_FIRST):
        return None
    body = text.rstrip()
    if not body:
        return None
    if "\n" in text[len(body) :]:
        return SHORTEST
    end = body.rstrip(_CLOSERS)[-1:]
    if end and (end in _WIDE_SENTENCE or (blank and end in _SENTENCE)):
        return SHORTEST
    if end and (end in _WIDE_CLAUSE or (blank and end in _CLAUSE)):
        in_number = not blank and char.isdigit() and body[-2:-1].isdigit()
        return None if in_number else SHORTEST_CLAUSE
    return None


def _forced_cut(text: str, char: str) -> int:
    """Where to cut a text that is too long: behind its last blank, before a number that goes on, or at its end."""
    body = len(text)
    while body and not text[body - 1].isspace():
        body -= 1
    if body:
        return body
    number = _ENDS_IN_NUMBER.search(text)
    goes_on = char.isdigit() or char in ".,"
    return number.start() or len(text) if number is not None and goes_on else len(text)
