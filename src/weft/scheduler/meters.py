"""What the scheduler counts for /stats and /metrics."""

from __future__ import annotations

from weft.core.histogram import Histogram
from weft.core.request import Request, RequestState


class Meters:
    """Counters and histograms since the start; seconds of the scheduler's clock.

    Attributes:
        finished: requests by terminal state.
        rejections: refused requests by reason ("queue_full", "invalid", "displaced").
        prompt_tokens, cached_tokens: of requests when they first entered a batch, and how many of them were cached.
        generation_tokens: tokens given to clients.
        retractions: how often a request was taken out of the batch for want of room.
        queue_time: from arrival to the first batch. prefill_time: from there to the first token.
        abort_latency: from the moment a client was known to be gone to the moment its KV and row were free.
    """

    def __init__(self) -> None:
        self.finished = {state.value: 0 for state in RequestState if state.terminal}
        self.rejections = {"queue_full": 0, "invalid": 0, "displaced": 0}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.retractions = 0
        self.queue_time = Histogram()
        self.prefill_time = Histogram()
        self.abort_latency = Histogram()

    def note_rejection(self, reason: str) -> None:
        self.finished[RequestState.REJECTED.value] += 1
        self.rejections[reason] += 1

    def note_first_batch(self, request: Request, now_s: float) -> None:
        self.prompt_tokens += request.input_len
        self.cached_tokens += request.reused_tokens
        self.queue_time.observe(max(0.0, now_s - request.arrival_s))

    def note_first_token(self, request: Request) -> None:
        assert request.first_token_s is not None and request.first_scheduled_s is not None
        self.prefill_time.observe(request.first_token_s - request.first_scheduled_s)
