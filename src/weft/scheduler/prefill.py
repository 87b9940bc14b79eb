"""`PrefillAdder`: the budget of one round, thrown away after it."""

from __future__ import annotations

from enum import Enum

from weft.core.request import Request
from weft.kv.pages import round_up
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.limits import Limits

MIN_SHARED_TOKENS = 16
"""Two prompts whose uncached parts agree in fewer tokens than this do not wait for each other."""


class Verdict(Enum):
    """What became of a candidate: taken; to be tried next step; or: nobody else fits either."""

    TAKEN = "taken"
    LATER = "later"
    STOP = "stop"


class PrefillAdder:
    """Takes waiting requests into one step until tokens, places or KV run out.

    What a running request may still produce is reserved in full, so that decoding never runs out of KV.

    Attributes:
        taken: (request, new tokens), in order; each request is attached to the cache.
        chunked: the request, if any, whose prompt does not end with this step; at most one.
    """

    def __init__(self, cache: PrefixCache, limits: Limits, running: list[Request]) -> None:
        self.taken: list[tuple[Request, int]] = []
        self.chunked: Request | None = None
        self._cache = cache
        self._limits = limits
        self._tokens_left = limits.max_prefill_tokens
        self._places_left = limits.max_batch_size - len(running)
        self._reserved = sum(self._growth(request) for request in running)
        # Uncached beginnings that this step computes, as (node where the cache ends, next tokens).
        self._claims: dict[tuple[int, bytes] | None, None] = {}

    @property
    def full(self) -> bool:
        """Whether nobody else can be taken, whoever it is."""
        return self._places_left <= 0 or self._tokens_left <= 0

    def continue_chunked(self, request: Request) -> None:
        """The request whose prompt was cut goes first; its KV is reserved since it was taken."""
        self._take(request)

    def add(self, request: Request) -> Verdict:
        """Tries one PENDING request; attaches it to the cache if taken, leaves no trace otherwise."""
        if self.full:
            return Verdict.STOP
        self._cache.attach(request, reuse=request.params.prompt_logprobs is None)
        verdict = self._judge(request)
        if verdict is Verdict.TAKEN:
            self._places_left -= 1
            self._reserved += self._growth(request)
            self._take(request)
        else:
            self._cache.cache_finished(request, keep=False)
            request.cached_len = 0
        return verdict

    def _judge(self, request: Request) -> Verdict:
        if self._reserved + self._growth(request) > self._cache.available:
            return Verdict.STOP
        reuses = request.params.prompt_logprobs is None  # who computes all of its prompt gains nothing by waiting
        if reuses and self._claim(request) in self._claims:
            return Verdict.LATER
        if self.chunked is not None and self._share(request) < request.extend_len:
            return Verdict.LATER  # only one prompt is cut at a time; shorter ones may still use what is left
        if self._limits.chunked_prefill_size is None and request.extend_len > self._tokens_left and self.taken:
            return Verdict.STOP
        return Verdict.TAKEN

    def _take(self, request: Request) -> None:
        tokens = self._share(request)
        if tokens < request.extend_len:
            self.chunked = request
        self._tokens_left -= tokens
        if (claim := self._claim(request)) is not None:
            self._claims[claim] = None
        self.taken.append((request, tokens))

    def _share(self, request: Request) -> int:
        """Tokens of the request that this step can compute."""
        if self._limits.chunked_prefill_size is None:
            return request.extend_len
        return min(request.extend_len, self._limits.chunked_prefill_size, self._tokens_left)

    def _claim(self, request: Request) -> tuple[int, bytes] | None:
        """Where the request leaves the cache and how it goes on; None when too little is left to wait for."""
        start: int = request.prefix.length
        share = max(MIN_SHARED_TOKENS, self._cache.page_size)
        # One token fewer than the prompt: the last one is computed by everybody.
        if start + share > request.device_len - 1:
            return None
        return id(request.prefix.node), request.tokens[start : start + share].tobytes()

    def _growth(self, request: Request) -> int:
        """Slots that the request may still take before it ends."""
        return round_up(request.max_device_len, self._cache.page_size) - request.allocated_len
