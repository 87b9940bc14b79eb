"""Who gets which worker. Pure decisions over the workers' records; the pool carries them out.

Turns of sessions, over workers with room, in this order; the first level that finds a place decides:

1. `hit`: a free place whose history is that of the turn. Of several: the one used last, then the worker added first.
2. `empty`: a worker with a place that holds no history, so that nothing is lost. Of several: one that holds no history
   at all, then the smallest load, then the fewest histories, then the worker added first.
3. `lru`: the free place that was used longest ago gives its history up. Of several: the worker added first.
4. None: the turn waits.

Other requests go to the smallest cost = seconds to compute what is not cached + seconds of waiting, over workers with
room; a request of a session (`X-Session-ID`) to the worker that had it, if that has room. Equal to the millisecond: the
smallest load, then least recently used, then the worker added first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.gateway.workers import Place, Worker


@dataclass(slots=True)
class Wanted:
    """What is known of a request before it has a worker.

    Attributes:
        kind: of the turn, for the average times: "streaming", "chat", …
        turn: whether it is a session's turn, which needs a place of a conversation.
        history: hash of what came before it, for a turn.
        session: the value of `X-Session-ID`, for other requests.
        digests, length: of its prompt, as `prompt_digests` makes them; length in characters, or in token ids.
        ids: the length counts token ids.
        avoid: names of workers that failed it, taken only where there is no other.
    """

    kind: str
    turn: bool = False
    history: str | None = None
    session: str | None = None
    digests: Sequence[tuple[str, int]] = ()
    length: int = 0
    ids: bool = False
    avoid: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker, for a turn also the place, and why. `known` is the part of the prompt's length that it holds."""

    worker: Worker
    reason: str
    place: Place | None = None
    cost_s: float | None = None
    known: int = 0
    uncached_tokens: float = 0.0


def choose(
    wanted: Wanted, workers: Iterable[Worker], now_s: float, *, home: str | None, turn_s: float
) -> Choice | None:
    """The worker for a request, None if none has room.

    `home`: name of the worker that had this session before. `turn_s`: how long a request of this kind usually takes.
    """
    free = [worker for worker in workers if worker.room(now_s, turn=wanted.turn)]
    preferred = [worker for worker in free if worker.name not in wanted.avoid]
    for candidates in (preferred, free):
        if candidates:
            choice = _place_for(wanted, candidates) if wanted.turn else _cheapest(wanted, candidates, home, turn_s)
            if choice is not None:
                return choice
    return None


def _place_for(wanted: Wanted, workers: list[Worker]) -> Choice | None:
    if wanted.history is not None:
        hits = [(worker, place) for worker in workers if (place := worker.place_of(wanted.history)) is not None]
        if hits:
            worker, place = min(hits, key=lambda hit: (-hit[1].last_used_s, hit[0].order))
            return Choice(worker, "hit", place)
    empty = [worker for worker in workers if worker.has_empty_place()]
    if empty:
        return Choice(min(empty, key=lambda w: (w.histories > 0, w.load, w.histories, w.order)), "empty")
    used = [(worker, place) for worker in workers if (place := worker.oldest_place()) is not None]
    if used:
        worker, place = min(used, key=lambda one: (one[1].last_used_s, one[0].order))
        return Choice(worker, "lru", place)
    return None


def _cheapest(wanted: Wanted, workers: list[Worker], home: str | None, turn_s: float) -> Choice:
    choices = [_priced(wanted, worker, turn_s) for worker in workers]
    for choice in choices:
        if home is not None and choice.worker.name == home:
            return Choice(choice.worker, "session", None, choice.cost_s, choice.known, choice.uncached_tokens)
    return min(choices, key=_rank)


def _rank(choice: Choice) -> tuple[float, float, float, int]:
    worker = choice.worker
    return round(choice.cost_s or 0.0, 3), worker.load, worker.last_used_s, worker.order


def _priced(wanted: Wanted, worker: Worker, turn_s: float) -> Choice:
    """Waiting is what the worker says of its queue, prompts on their way to it that it has not begun to answer, and
    the slowing by those that run there: a turn takes as much longer as there are slots in use."""
    known = worker.known_length(wanted.digests)
    uncached = (wanted.length - known) * (1.0 if wanted.ids else worker.tokens_per_char)
    waiting_s = worker.wait_s + worker.unbegun_tokens / worker.prefill_tokens_per_s + worker.load * turn_s
    cost_s = uncached / worker.prefill_tokens_per_s + waiting_s
    return Choice(worker, "prefix" if known else "load", None, cost_s, known, uncached)
