"""A `Worker` as the gateway knows it: what it said of itself, who has places on it, and whether it can be trusted.

Its state is never stored, only derived from facts, so that no late answer of a health check can overwrite what has
happened since: `offline` (cannot be reached), `error` (answers wrongly, or fails requests), `loading` (never ready so
far), `draining` (takes nothing new), else `busy` or `idle` (with or without work from this gateway).

Invariants: `in_flight` is the number of leases that are open on it, `turns` those of sessions among them. A
conversation's place is on one worker for good; one lease at most uses it, and while it is used, it has no history.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WorkerState = Literal["loading", "idle", "busy", "draining", "error", "offline"]
STATES: tuple[WorkerState, ...] = ("loading", "idle", "busy", "draining", "error", "offline")

TRUSTED_FAILURES = 2
"""So many requests in a row may fail on a worker whose health is good; with one more it has to rest."""

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
MISSED_CHECKS = 2
"""Health checks in a row without an answer in time that make a worker `error`; a refused connection is one at once."""

_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_TOKENS_PER_CHAR = 0.3
_MAX_OWN_PREFIXES = 8192

PATIENCE_S = 10.0
"""So long somebody may wait for a worker that has broken off and not been heard since, where there is no other."""


@dataclass(eq=False, slots=True)
class Place:
    """Where a worker keeps one conversation. `id` is the session's name there.

    `history`: hash of the conversation that it holds; None while it is in use, or when it holds none that is trusted.
    `epoch`: the worker's word for the state that it was in then.
    """

    id: str
    history: str | None = None
    epoch: str | None = None
    cached_tokens: int = 0
    used: bool = False
    last_used_s: float = 0.0

    def clear(self) -> None:
        self.history, self.epoch, self.cached_tokens = None, None, 0


@dataclass(eq=False, slots=True)
class Worker:
    """See the module's docstring. `name` is unique for the life of the gateway; `order` counts in order of adding."""

    name: str
    url: str
    order: int
    boot_id: str | None = None
    model: str | None = None
    slots: int = 0
    session_slots: int = 0
    wait_s: float = 0.0
    queued: int = 0
    ready: bool = False
    was_ready: bool = False
    draining: bool = False
    reachable: bool = True
    missed_checks: int = 0
    troubled_s: float | None = None
    failures: int = 0
    failures_total: int = 0
    requests_total: int = 0
    hits_total: int = 0
    last_error: str | None = None
    rests_until_s: float = 0.0
    starting: bool = False
    prefill_tokens_per_s: float = _DEFAULT_PREFILL_TOKENS_PER_S
    tokens_per_char: float = _DEFAULT_TOKENS_PER_CHAR
    in_flight: int = 0
    turns: int = 0
    unbegun_tokens: float = 0.0
    last_used_s: float = 0.0
    places: list[Place] = field(default_factory=list)
    _reported: frozenset[str] = frozenset()
    _own: OrderedDict[str, None] = field(default_factory=OrderedDict)

    # ---- what it is fit for -----------------------------------------------------------------------------------

    def state(self, now_s: float) -> WorkerState:
        if not self.reachable:
            return "loading" if self.starting else "offline"
        if self.draining:
            return "draining"
        if not self.was_ready and self.missed_checks < MISSED_CHECKS:
            return "loading"
        if not self.ready or self.missed_checks >= MISSED_CHECKS or now_s < self.rests_until_s:
            return "error"
        return "busy" if self.in_flight else "idle"

    def usable(self, now_s: float) -> bool:
        """Whether it takes work at all."""
        return self.state(now_s) in ("idle", "busy")

    def may_return(self, now_s: float) -> bool:
        """Whether it is worth waiting for: it works, starts, rests, or has been silent for a short while only."""
        if self.state(now_s) in ("idle", "busy", "loading"):
            return True
        if not self.reachable or self.draining:
            return False
        if self.troubled_s is not None:
            return now_s - self.troubled_s < PATIENCE_S
        return self.ready and now_s < self.rests_until_s

    def room(self, now_s: float, *, turn: bool) -> int:
        """How many more requests, or sessions' turns, it takes now. After failures it is tried with one at a time.

        Turns are limited by its slots for sessions, other requests by those for requests: what a turn computes waits in
        the worker's own queue where it has to, near its cache, rather than go where it has none.
        """
        if not self.usable(now_s):
            return 0
        if self.failures > TRUSTED_FAILURES:
            return int(not self.in_flight)
        return max(0, self.session_slots - self.turns if turn else self.slots - (self.in_flight - self.turns))

    @property
    def load(self) -> float:
        """Work under way for each of its slots."""
        return self.in_flight / max(1, self.slots)

    # ---- health -----------------------------------------------------------------------------------------------

    def heard(self, facts: dict[str, Any]) -> None:
        """It has answered a health check. Another boot id than before: nothing that it held is there any more."""
        if facts["boot_id"] != self.boot_id:
            self.forget()
            self.failures, self.rests_until_s = 0, 0.0
            self.boot_id = facts["boot_id"]
        self.reachable, self.missed_checks, self.starting = True, 0, False
        self.troubled_s = None
        self.model = facts["model"]
        self.ready, self.draining = bool(facts["ready"]), bool(facts["draining"])
        if self.ready and not self.was_ready:
            self.was_ready, self.last_error = True, None
        self.slots, self.session_slots = facts["requests"]["total"], facts["sessions"]["total"]
        self.queued, self.wait_s = facts["queued"], facts["wait_s"]
        self.prefill_tokens_per_s = facts["prefill_tokens_per_s"] or _DEFAULT_PREFILL_TOKENS_PER_S
        self.tokens_per_char = facts["tokens_per_char"] or _DEFAULT_TOKENS_PER_CHAR
        self._reported = frozenset(facts["prefixes"])
        self._own.clear()

    def missed(self, reason: str, now_s: float, *, refused: bool) -> None:
        """It has not answered a health check; `refused`: it cannot be reached at all."""
        self.missed_checks += 1
        self.troubled_s = self.troubled_s or now_s
        self.last_error = reason
        if refused:
            self.reachable = False

    def failed(self, reason: str, now_s: float) -> None:
        """A request has failed on it. After several in a row it rests, longer each time."""
        self.failures += 1
        self.failures_total += 1
        self.last_error = reason
        more = self.failures - TRUSTED_FAILURES
        if more > 0:
            self.rests_until_s = now_s + min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(more - 1, 16))

    def lost(self, reason: str, now_s: float) -> None:
        """It has died, as its process or a cut connection says: out until it answers a health check again."""
        self.troubled_s = self.troubled_s or now_s
        self.missed_checks = max(self.missed_checks, MISSED_CHECKS)
        self.last_error = reason

    def succeeded(self) -> None:
        self.failures = 0

    def forget(self) -> None:
        """Nothing that it held is known to be there."""
        for place in self.places:
            place.clear()
        self._reported = frozenset()
        self._own.clear()

    # ---- what it holds ----------------------------------------------------------------------------------------

    @property
    def histories(self) -> int:
        """Conversations that it is known to hold."""
        return sum(place.history is not None for place in self.places)

    def place_of(self, history: str) -> Place | None:
        """The place that holds this history, the last used one of several; None: it has none that is free."""
        found = [place for place in self.places if place.history == history and not place.used]
        return max(found, key=lambda place: place.last_used_s, default=None)

    def empty_place(self, prefix: str) -> Place | None:
        """A place without history, a new one if need be; `prefix`: of its name. None: all hold one, or are used."""
        for place in self.places:
            if place.history is None and not place.used:
                return place
        if len(self.places) >= self.session_slots:
            return None
        place = Place(f"{prefix}{self.name}-{len(self.places) + 1}")
        self.places.append(place)
        return place

    def has_empty_place(self) -> bool:
        return len(self.places) < self.session_slots or any(p.history is None and not p.used for p in self.places)

    def oldest_place(self) -> Place | None:
        """The place that is free and was used longest ago."""
        return min((p for p in self.places if not p.used), key=lambda place: place.last_used_s, default=None)

    def known_length(self, digests: Sequence[tuple[str, int]]) -> int:
        """How much of a prompt it holds: the length at its last digest that is known here."""
        for digest, length in reversed(digests):
            if digest in self._reported or digest in self._own:
                return length
        return 0

    def holds(self, digests: Sequence[tuple[str, int]]) -> None:
        """A prompt with these digests has been computed there; until the worker tells itself what it holds."""
        for digest, _ in digests:
            self._own[digest] = None
            self._own.move_to_end(digest)
        while len(self._own) > _MAX_OWN_PREFIXES:
            self._own.popitem(last=False)

    def lacks(self, digests: Sequence[tuple[str, int]]) -> None:
        """A prompt has not been computed there after all."""
        for digest, _ in digests:
            self._own.pop(digest, None)
