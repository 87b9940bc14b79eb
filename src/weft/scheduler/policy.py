"""The order in which waiting requests are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.core.plan import Int32s
from weft.core.request import Request
from weft.scheduler.limits import Limits

Peek = Callable[[Int32s], int]

MAX_OVERTAKEN = 128
"""Under lpm, whoever was overtaken by so many comes next: a stream of cached prompts must not starve a new one."""


def ordered(requests: Iterable[Request], limits: Limits, peek: Peek, served: int = 0) -> list[Request]:
    """Requests in the order of `limits.policy`; equal ones by arrival, then by id.

    `peek(tokens)` tells how many tokens of a prompt are cached now; `served` counts those that wait no longer, so that
    `served - request.turn` is at most how many have overtaken a request.
    """
    if limits.policy == "lpm":
        first = served - MAX_OVERTAKEN  # turns up to here have waited long enough
        return sorted(
            requests,
            key=lambda r: (
                _rank(r, limits),
                r.turn > first,
                -peek(r.tokens) if r.turn > first else 0,
                r.arrival_s,
                r.request_id,
            ),
        )
    return sorted(requests, key=lambda r: (_rank(r, limits), r.arrival_s, r.request_id))


def _rank(request: Request, limits: Limits) -> int:
    return request.priority if limits.priority else 0
