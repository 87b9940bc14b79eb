"""What the API process counts and times itself: how requests ended, and how fast their clients saw them.

A request counts once: when its end reaches this process, or when its client has gone before that ("cancelled"). Each of
several answers to one HTTP request counts; an HTTP request that was refused before it got answers counts once.
"""

from __future__ import annotations

from bisect import bisect_left

from weft.core.errors import WeftError
from weft.core.histogram import Histogram
from weft.ipc.messages import End

OUTCOMES = ("completed", "timeout", "failed", "cancelled", "rejected")
REASONS = ("queue_full", "invalid", "displaced", "draining", "loading", "unavailable", "unauthorised", "body_too_large")

_REASON_BY_STATUS = {401: "unauthorised", 413: "body_too_large", 429: "queue_full", 503: "unavailable"}


class Measures:
    """Counters and histograms of this process.

    Attributes:
        outcomes: requests by how they ended.
        rejections: those of them that were rejected, by reason.
        time_to_first_token: seconds from arrival to the first token of a stream.
        inter_token_latency: seconds between two tokens of a stream; tokens that came together share their time.
        e2e_request_latency: seconds from arrival to the end, of requests that completed.
    """

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.rejections = dict.fromkeys(REASONS, 0)
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.e2e_request_latency = Histogram()

    def ended(self, end: End | None, seconds: float) -> None:
        """One answer has ended, `seconds` after its arrival; None: its client had gone before."""
        if end is None:
            self.outcomes["cancelled"] += 1
            return
        self.outcomes[end.state] += 1
        if end.state == "completed":
            self.e2e_request_latency.observe(seconds)
        elif end.state == "rejected":
            status, code = (400, None) if end.error is None else (end.error.http_status, end.error.code)
            self.rejections[_reason(status, code)] += 1

    def refused(self, error: WeftError) -> None:
        """A request was refused before it got any answers; by a bug of ours, it failed."""
        if error.http_status == 500:
            self.outcomes["failed"] += 1
            return
        self.outcomes["rejected"] += 1
        self.rejections[_reason(error.http_status, error.code)] += 1

    def streamed(self, tokens: int, seconds: float) -> None:
        """A stream got `tokens`, `seconds` after those before them."""
        histogram = self.inter_token_latency
        histogram.counts[bisect_left(histogram.bounds, seconds / tokens)] += tokens
        histogram.total += seconds


def _reason(status: int, code: str | None) -> str:
    if code in REASONS:
        return code
    return _REASON_BY_STATUS.get(status, "invalid")
