"""`PrefillAdder`: the budget of one round, thrown away after it."""

from __future__ import annotations

from enum import Enum

from weft.core.request import Request
from weft.kv.pages import round_up
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.limits import Limits
from weft.scheduler.reserve import NewTokenRatio

MIN_SHARED_TOKENS = 16
"""Two prompts whose uncached parts agree in fewer tokens than this do not wait for each other."""


class Verdict(Enum):
    """What became of a candidate: taken; to be tried next step; or: nobody else fits either."""

    TAKEN = "taken"
    LATER = "later"
    STOP = "stop"


class PrefillAdder:
    """Takes waiting requests into one step until tokens, places or KV run out.

    Args:
        cache: the KV cache.
        limits: the scheduler's.
        ratio: how much to keep free for what running requests may still produce.
        running: the batch; who in it has part of its prompt in flight, claims that part.
        places: how many more requests the batch takes.
        decoding: the requests that take their next token in this step or the next; their slots are theirs.
        now_s: the time, for the ledger.
        stall_tokens: most prompt tokens while others decode, besides what `limits` say; None: no more to say.
        alone: whether nobody else holds KV, so that the first candidate may have all of it.

    Attributes:
        taken: (request, new tokens), in order; each request is attached to the cache.
        chunked: the request, if any, whose prompt does not end with this step; at most one.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        ratio: NewTokenRatio,
        running: list[Request],
        *,
        places: int,
        decoding: list[Request],
        alone: bool,
        now_s: float,
        stall_tokens: int | None = None,
    ) -> None:
        self.taken: list[tuple[Request, int]] = []
        self.chunked: Request | None = None
        self._cache = cache
        self._limits = limits
        self._ratio = ratio
        self._places_left = places
        self._alone = alone
        self._now_s = now_s
        budget = limits.max_prefill_tokens
        if limits.mixed and decoding and limits.chunked_prefill_size is not None:
            budget = min(budget, limits.chunked_prefill_size)  # running streams wait for one chunk, not for several
            if stall_tokens is not None:
                budget = min(budget, stall_tokens)
        self._tokens_left = budget
        self._step_room = cache.available - sum(cache.room_needed(r, r.planned_len + 1) for r in decoding)
        self._reserved = sum(self._growth(request) for request in running)
        # Uncached beginnings that this step or one in flight computes, as (node where the cache ends, next tokens).
        self._claims: dict[tuple[int, bytes] | None, None] = {}
        for request in running:
            if request.planned_len - request.cached_len >= MIN_SHARED_TOKENS:
                self._add_claim(request)

    @property
    def full(self) -> bool:
        """Whether nobody else can be taken, whoever it is."""
        return self._places_left <= 0 or self._tokens_left <= 0

    def continue_chunked(self, request: Request, *, may_go_on: bool = True) -> None:
        """The request whose prompt was cut goes first; it may have to wait while others take the last of the KV."""
        if may_go_on and self._share(request) > 0:
            self._take(request)
        else:
            self.chunked = request

    def add(self, request: Request) -> Verdict:
        """Tries one PENDING request; attaches it to the cache if taken, leaves no trace otherwise."""
        if self.full:
            return Verdict.STOP
        before, first_miss = self._cache.available, request.miss
        self._cache.attach(request, reuse=reuses_cache(request), now_s=self._now_s)
        if request.retractions:
            request.miss = first_miss  # that its own KV had to go is no miss of the prompt
        elif request.resumed_len and _misses_output(request, self._cache.page_size):
            request.miss = None  # nor is what lies behind the prompt
        request.planned_len = request.cached_len
        shared = before - self._cache.available  # can no longer be evicted
        self._step_room -= shared
        verdict = self._judge(request)
        if verdict is Verdict.TAKEN and not self._cache.bind(request, self._now_s):
            verdict = Verdict.STOP  # every sequence is in use
        if verdict is Verdict.TAKEN:
            self._step_room -= request.allocated_len - request.prefix.length  # what came back from the host's memory
            self._places_left -= 1
            self._reserved += self._growth(request)
            self._alone = False
            self._take(request)
        else:
            self._cache.cache_finished(request, keep=False)
            request.cached_len = request.planned_len = 0
            self._step_room += shared
        return verdict

    def keep_room(self, request: Request) -> None:
        """Who comes later in line must leave room for this PENDING request, which cannot be in this step.

        Not while nobody holds KV: then whoever has the turn goes first, or, in an order that changes, nobody would.
        """
        if not self._alone:
            self._reserved += self._growth(request)

    def _judge(self, request: Request) -> Verdict:
        needed = self._growth(request)
        if self._alone:
            needed = min(needed, self._cache.room_needed(request, request.device_len))
        if self._reserved + needed > self._cache.available:
            return Verdict.STOP
        if self._cache.shares and reuses_cache(request) and self._claim(request) in self._claims:
            return Verdict.LATER
        share = self._share(request)
        if share <= 0:
            return Verdict.STOP
        if self.chunked is not None and share < request.extend_len:
            return Verdict.LATER  # only one prompt is cut at a time; shorter ones may still use what is left
        if self._chunk(request) is None and request.extend_len > self._tokens_left and self.taken:
            return Verdict.STOP
        return Verdict.TAKEN

    def _take(self, request: Request) -> None:
        tokens = self._share(request)
        if tokens < request.extend_len:
            self.chunked = request
        self._tokens_left -= tokens
        self._step_room -= self._cache.room_needed(request, request.planned_len + tokens)
        self._add_claim(request)
        self.taken.append((request, tokens))

    def _share(self, request: Request) -> int:
        """Tokens of the request that this step can compute: what budgets and free slots allow."""
        page = self._cache.page_size
        room = request.allocated_len - request.planned_len + self._step_room // page * page
        chunk = self._chunk(request)
        if chunk is None:
            return request.extend_len if request.extend_len <= room else 0
        return min(request.extend_len, chunk, self._tokens_left, room)

    def _chunk(self, request: Request) -> int | None:
        """Most tokens of the request in one step; None: its prompt is not to be cut."""
        return None if request.params.embed else self._limits.chunked_prefill_size

    def _add_claim(self, request: Request) -> None:
        claim = self._claim(request)
        if claim is not None:
            self._claims[claim] = None

    def _claim(self, request: Request) -> tuple[int, bytes] | None:
        """Where the request leaves the cache and how it goes on; None when too little is left to wait for."""
        start: int = request.prefix.length
        share = max(MIN_SHARED_TOKENS, self._cache.page_size)
        # One token fewer than the prompt: the last one is computed by everybody.
        if start + share > request.device_len - 1:
            return None
        return id(request.prefix.node), request.keys(start, start + share).tobytes()

    def _growth(self, request: Request) -> int:
        """Slots to keep for the request: the rest of its prompt, and what it is expected to produce."""
        end = min(request.max_device_len, request.expected_len + self._ratio.growth(request))
        return max(0, round_up(end, self._cache.page_size) - request.allocated_len)


def _misses_output(request: Request, page_size: int) -> bool:
    """Whether all of the prompt was cached that could be, and only what was generated after it was not."""
    return request.miss is not None and request.miss.at_token + page_size >= request.input_len


def reuses_cache(request: Request) -> bool:
    """Whether a request may start from cached KV; not who wants log probabilities of its prompt, or its vector."""
    if request.params.embed:
        return False
    return request.params.prompt_logprobs is None or request.prompt_logprobs_len >= request.input_len
