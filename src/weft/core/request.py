"""`Request`, its states and the only methods that change them.

Invariants: 0 <= cached_len <= device_len <= max_device_len; a terminal state is entered exactly once and never left;
every edge that DESIGN.md's diagram does not show raises InvariantError.

Steps may overlap: while one with this request is in flight, the next may be planned. So there are two views of a
request. `cached_len` and `device_len` are facts; `planned_len` and `expected_len` are what they will be once every step
in flight has landed. Outside of steps the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Literal

import numpy as np

from weft.core.errors import InvariantError, WeftError
from weft.core.media import MediaSpan
from weft.core.plan import Int32s
from weft.core.sampling import SamplingParams


class RequestState(Enum):
    """Where a request stands; see the diagram in docs/architecture.md."""

    QUEUED = "queued"
    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"

    @property
    def terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = frozenset(
    (
        RequestState.COMPLETED,
        RequestState.TIMEOUT,
        RequestState.FAILED,
        RequestState.CANCELLED,
        RequestState.REJECTED,
    )
)

_EDGES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset(
        (RequestState.PENDING, RequestState.REJECTED, RequestState.CANCELLED, RequestState.TIMEOUT)
    ),
    RequestState.PENDING: frozenset(
        (RequestState.PROCESSING, RequestState.CANCELLED, RequestState.TIMEOUT, RequestState.FAILED)
    ),
    RequestState.PROCESSING: frozenset(
        (
            RequestState.COMPLETED,
            RequestState.TIMEOUT,
            RequestState.FAILED,
            RequestState.CANCELLED,
            RequestState.PENDING,
        )
    ),
}


class FinishReason(StrEnum):
    """Why a completed request stopped, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: a finish reason when it completed, an error otherwise.

    Attributes:
        state: the terminal state.
        finish_reason: set exactly when `state` is COMPLETED.
        stop_token: the token id that ended the text, if one did; its text is not part of the answer.
        error: what to tell the client when the request did not complete.
    """

    state: RequestState
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: WeftError | None = None


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why not more of a prompt was found in the cache.

    Attributes:
        reason: "never_seen": what was cached ends here; "evicted": what follows was cached once; "diverged": other
            prompts go on differently from here; "not_used": the request wants all of its prompt computed.
        at_token: how many tokens were found.
    """

    reason: Literal["never_seen", "evicted", "diverged", "not_used"]
    at_token: int


def end_tokens(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end a request with these parameters, once it has its `min_tokens`."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))


class Request:
    """One prompt with its sampling parameters and its place in the cache.

    Args:
        request_id: unique integer.
        prompt_ids: int32 [n], n >= 1.
        resume_ids: int32 [m], tokens that were generated elsewhere; the request stands as if it had done so itself.
        params: validated sampling parameters.
        max_device_len: hard limit on prompt plus generated tokens; the prompt's own length where nothing is generated.
        seed: 64-bit seed of this request's draws.
        eos_token_ids: end tokens of the model (ignored with `ignore_eos`).
        arrival_s: clock time of arrival.
        priority: lower runs first, where the scheduler heeds it.
        deadline_s: clock time past which the client does not want an answer any more.
        session_id, session_ttl_s: the conversation that keeps its KV, and for how long.
        adapter: 0 for the model itself, k for the k-th LoRA adapter on top of it.
        key_offset: see `keys`; different for every adapter, 0 for none.
        media: the images and sounds that tokens of the prompt stand for, in order, none over another.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: Int32s,
        params: SamplingParams,
        *,
        max_device_len: int,
        seed: int,
        resume_ids: Int32s | None = None,
        eos_token_ids: tuple[int, ...] = (),
        arrival_s: float = 0.0,
        priority: int = 0,
        deadline_s: float | None = None,
        session_id: str | None = None,
        session_ttl_s: float | None = None,
        adapter: int = 0,
        key_offset: int = 0,
        media: tuple[MediaSpan, ...] = (),
    ) -> None:
        input_len = len(prompt_ids)
        resumed_len = 0 if resume_ids is None else len(resume_ids)
        if not 1 <= input_len <= max_device_len - (not params.embed):
            raise InvariantError(f"request {request_id}: {input_len} prompt tokens, limit {max_device_len}")
        if resumed_len > max_device_len - input_len:
            raise InvariantError(f"request {request_id}: resumed with {resumed_len} tokens, limit {max_device_len}")
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.priority = priority
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        self.session_id = session_id
        self.session_ttl_s = session_ttl_s
        self.adapter = adapter
        self._key_offset = key_offset
        self.media = media
        self.input_len = input_len
        self.resumed_len = resumed_len
        self.max_device_len = max_device_len
        self.cached_len = 0
        self.device_len = input_len + resumed_len
        # Grown by doubling: a limit of 100k tokens must not cost 400 kB for a request that says ten words.
        self._tokens = np.empty(min(max_device_len, self.device_len + 64), dtype=np.int32)
        self._tokens[:input_len] = prompt_ids
        if resume_ids is not None:
            self._tokens[input_len : self.device_len] = resume_ids
        self.last_token = int(self._tokens[self.device_len - 1])
        self.end_tokens = end_tokens(params, eos_token_ids)
        self.state = RequestState.QUEUED
        self.history: list[tuple[RequestState, float]] = [(RequestState.QUEUED, arrival_s)]
        self.ending: Ending | None = None
        # Owned by the KV cache: table row, locked prefix, slots handed out (see kv/prefix_cache.py).
        self.row: int = -1
        self.prefix: Any = None
        self.allocated_len = 0
        # Facts for `usage`, /stats and logs.
        self.reused_tokens = 0
        self.miss: CacheMiss | None = None
        self.chunks = 0
        self.retractions = 0
        # Of steps in flight: how many, and what they will add.
        self.in_flight = 0
        self.tokens_in_flight = 0
        self.planned_len = 0
        self.prompt_logprobs_len = 1  # prompt tokens whose log probabilities are delivered; the first one has none
        self.admitted_s: float | None = None
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.value}, cached {self.cached_len} of {self.device_len},"
            f" limit {self.max_device_len})"
        )

    @property
    def expected_len(self) -> int:
        """Tokens known once every step in flight has landed."""
        return self.device_len + self.tokens_in_flight

    @property
    def extend_len(self) -> int:
        """Tokens whose KV the next step must compute."""
        return self.expected_len - self.planned_len

    @property
    def output_len(self) -> int:
        return self.device_len - self.input_len

    @property
    def tokens(self) -> Int32s:
        """int32 [device_len], prompt and output; a view, valid until the next append."""
        return self._tokens[: self.device_len]

    def keys(self, start: int, end: int) -> Int32s:
        """int32 [end - start], what the prefix cache knows tokens [start, end) by; equal where KV can be shared.

        KV depends on the adapter as much as on the tokens. Each adapter therefore has a range of keys of its own: the
        token ids, moved by `key_offset`. Without an adapter they are the tokens themselves, a view like `tokens`.
        Tokens that stand for a medium have keys of that medium instead, which are no token's.
        """
        tokens = self._tokens[start:end]
        keys = tokens + np.int32(self._key_offset) if self._key_offset else tokens
        if not self.media or self.media[-1].end <= start:
            return keys
        keys = keys.copy()
        for span in self.media:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                keys[first - start : last - start] = span.keys[first - span.start : last - span.start]
        return keys

    def without_split_media(self, length: int) -> int:
        """The longest beginning of at most `length` tokens that ends within no medium."""
        return next((span.start for span in self.media if span.start < length < span.end), length)

    @property
    def prompt_ids(self) -> Int32s:
        return self._tokens[: self.input_len]

    @property
    def output_ids(self) -> Int32s:
        return self._tokens[self.input_len : self.device_len]

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_device_len - self.device_len

    def admit(self, now_s: float) -> None:
        """QUEUED to PENDING: into the running set."""
        self._enter(RequestState.PENDING, now_s)
        self.admitted_s = now_s

    def schedule(self, now_s: float) -> None:
        """PENDING to PROCESSING: into a batch."""
        self._enter(RequestState.PROCESSING, now_s)
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s

    def retract(self, now_s: float) -> None:
        """PROCESSING to PENDING: out of the batch, with its output; it must hold no KV and be in no step."""
        if self.in_flight or self.row >= 0:
            raise InvariantError(f"{self!r}: retracted while in flight or holding KV")
        self._enter(RequestState.PENDING, now_s)
        self.retractions += 1
        self.cached_len = self.planned_len = 0

    def finish(self, ending: Ending, now_s: float) -> None:
        """Enters a terminal state; the one place where a request ends."""
        if not ending.state.terminal or (ending.finish_reason is not None) != (ending.state is RequestState.COMPLETED):
            raise InvariantError(f"request {self.request_id}: {ending} is no ending")
        self._enter(ending.state, now_s)
        self.ending = ending
        self.finished_s = now_s

    def depart(self, computed: int, *, emits: bool) -> None:
        """It takes part in a step that stores the KV of `computed` more tokens, and yields a token if it `emits`."""
        if computed < 1 or computed > self.extend_len or self.expected_len + emits > self.max_device_len:
            raise InvariantError(f"{self!r}: no step of {computed} tokens")
        self.in_flight += 1
        self.planned_len += computed
        self.tokens_in_flight += emits

    def land(self, *, emits: bool) -> None:
        """The oldest of its steps in flight is over, whatever it gave."""
        if not self.in_flight:
            raise InvariantError(f"{self!r} is in no step")
        self.in_flight -= 1
        self.tokens_in_flight -= emits

    def undo(self, computed: int, *, emits: bool) -> None:
        """The oldest of its steps in flight was not computed; it is to be planned again."""
        self.land(emits=emits)
        self.planned_len -= computed
        if self.planned_len < self.cached_len:
            raise InvariantError(f"{self!r}: cannot undo {computed} tokens")

    def advance(self, computed: int) -> None:
        """Records that a step stored the KV of `computed` more tokens."""
        if computed < 0 or self.cached_len + computed > min(self.device_len, self.planned_len):
            raise InvariantError(f"{self!r}: cannot advance by {computed}")
        self.cached_len += computed

    def append(self, token: int) -> Ending | None:
        """Adds a generated token; says how the request ends by it, if it does.

        An end token counts as generated but is not part of the text. Precedence: end token, then length.
        """
        if self.device_len >= self.max_device_len:
            raise InvariantError(f"{self!r}: append beyond the limit")
        if self.device_len == len(self._tokens):
            grown = np.empty(min(self.max_device_len, 2 * len(self._tokens)), dtype=np.int32)
            grown[: self.device_len] = self._tokens
            self._tokens = grown
        self._tokens[self.device_len] = self.last_token = token
        self.device_len += 1
        if token in self.end_tokens and self.output_len > self.params.min_tokens:
            return Ending(RequestState.COMPLETED, FinishReason.STOP, stop_token=token)
        if self.device_len == self.max_device_len:
            return Ending(RequestState.COMPLETED, FinishReason.LENGTH)
        return None

    def _enter(self, state: RequestState, now_s: float) -> None:
        if state not in _EDGES.get(self.state, frozenset()):
            raise InvariantError(f"request {self.request_id}: {self.state.value} cannot become {state.value}")
        self.state = state
        self.history.append((state, now_s))
