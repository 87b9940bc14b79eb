"""The order in which waiting requests are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.core.plan import Int32s
from weft.core.request import Request
from weft.scheduler.limits import Limits

Peek = Callable[[Int32s], int]


def ordered(requests: Iterable[Request], limits: Limits, peek: Peek) -> list[Request]:
    """Requests in the order of `limits.policy`; equal ones by arrival, then by id.

    `peek(tokens)` tells how many tokens of a prompt are cached now.
    """
    if limits.policy == "lpm":
        return sorted(requests, key=lambda r: (_rank(r, limits), -peek(r.tokens), r.arrival_s, r.request_id))
    return sorted(requests, key=lambda r: (_rank(r, limits), r.arrival_s, r.request_id))


def _rank(request: Request, limits: Limits) -> int:
    return request.priority if limits.priority else 0
