"""How much room admission keeps free for what running requests may still produce.

Reserving everything wastes most of the cache, since most answers end long before their limit; reserving nothing makes
the scheduler retract all the time. So a share of it is reserved, `new_token_ratio`, which sinks while all goes well and
jumps after a retraction to what would have sufficed (after SGLang's scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.request import Request

START, FLOOR = 0.7, 0.1
DECAY_STEPS = 600
MAX_ESTIMATE = 4096
"""More than this is reserved for nobody: a client that leaves `max_tokens` out must not take the whole cache."""

MIN_GROWTH = 32
"""At least this is reserved for everybody, so that steps lie between two retractions of one request."""


class NewTokenRatio:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.value = START

    def growth(self, request: Request) -> int:
        """New tokens to reserve for a request, its tokens in flight not counted."""
        left = request.max_device_len - request.expected_len
        return min(left, max(MIN_GROWTH, int(self.value * min(left, MAX_ESTIMATE))))

    def note_step(self) -> None:
        """A step went well."""
        self.value = max(FLOOR, self.value - (START - FLOOR) / DECAY_STEPS)

    def note_retraction(self, running: Iterable[Request]) -> None:
        """Decoding ran out of room: `running` are those that were in the batch."""
        produced = wanted = 0
        for request in running:
            produced += request.output_len + MIN_GROWTH
            wanted += min(request.max_device_len - request.input_len, MAX_ESTIMATE)
        self.value = min(1.0, max(self.value, START / 2, produced / max(1, wanted)))
