"""`Witness`: knows what must be true of every request, and says when it is not."""

from __future__ import annotations

import numpy as np

from weft.core.plan import Int64s
from weft.core.request import FinishReason, Request, RequestState
from weft.scheduler.limits import Limits
from weft.scheduler.scheduler import Update
from weft.sim.model import choose, kv_values, total_of

_SLACK_S = 1e-6


class Breach(Exception):
    """A promise to a client was broken."""


class Witness:
    """Follows all requests from outside: the tokens that each must get, and the endings that it may have.

    A token is compared with what the model gives for the request's own tokens alone, so it does not matter what the
    cache, the batch or a retraction did meanwhile; only that it left no trace.

    Args:
        requests: highest request id.
        vocab: of the model.
        limits: the scheduler's.
        tick_s: how often deadlines are looked at; a deadline that passed must show within that time. None: whenever.

    Attributes:
        output_lens: int64 by request id, tokens that its client got.
        open: accepted requests that have not ended.
        cancelled, completed, broken: requests that were aborted, that a stop string ended, that a step of went wrong.
        outgrown: requests that the KV cache was too small for, and that ended with what they had.
    """

    def __init__(self, requests: int, vocab: int, limits: Limits, tick_s: float | None) -> None:
        size = requests + 1
        self._vocab = vocab
        self._limits = limits
        self._tick_s = tick_s
        self._totals = np.zeros(size, dtype=np.uint64)
        self._adapters = np.zeros(size, dtype=np.int64)
        self._seeds = np.zeros(size, dtype=np.uint64)
        self._sampled = np.zeros(size, dtype=np.int64)  # 0: greedy, so that its draws do not depend on their number
        self._input_lens = np.zeros(size, dtype=np.int64)
        self._limits_at = np.zeros(size, dtype=np.int64)
        self._banned: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.output_lens = np.zeros(size, dtype=np.int64)
        self.open: dict[int, Request] = {}
        self.cancelled: dict[int, None] = {}
        self.completed: dict[int, None] = {}
        self.broken: dict[int, None] = {}
        self.outgrown = 0

    def accept(self, request: Request) -> None:
        """A request was taken into the queue, and is owed exactly one ending."""
        request_id, params = request.request_id, request.params
        self.open[request_id] = request
        self._totals[request_id] = total_of(request.prompt_ids, request.adapter)
        self._adapters[request_id] = request.adapter
        self._input_lens[request_id] = request.input_len
        most = request.max_device_len - request.input_len
        self._limits_at[request_id] = most if params.max_new_tokens is None else min(most, params.max_new_tokens)
        if not params.greedy:
            self._seeds[request_id], self._sampled[request_id] = request.seed, 1
        if params.min_tokens:
            self._banned[request_id] = (params.min_tokens, tuple(sorted(request.end_tokens)))

    def see_tokens(self, ids: Int64s, tokens: Int64s) -> None:
        """One new token for each of different requests. Raises Breach."""
        counts = self.output_lens[ids]
        banned = {}
        if self._banned:
            for row, request_id in enumerate(ids.tolist()):
                rule = self._banned.get(request_id)
                if rule is not None and counts[row] < rule[0]:
                    banned[row] = rule[1]
        expected = choose(self._totals[ids], self._seeds[ids], counts * self._sampled[ids], self._vocab, banned)
        wrong = np.flatnonzero(expected != tokens)
        if len(wrong):
            row = int(wrong[0])
            raise Breach(
                f"request {ids[row]}: its token {counts[row]} is {tokens[row]}, but alone it would be {expected[row]}"
            )
        self._totals[ids] += kv_values(tokens, self._input_lens[ids] + counts, self._adapters[ids])
        counts += 1
        self.output_lens[ids] = counts
        if (counts > self._limits_at[ids]).any():
            row = int(np.flatnonzero(counts > self._limits_at[ids])[0])
            raise Breach(f"request {ids[row]}: {counts[row]} tokens, limit {self._limits_at[ids[row]]}")

    def see_ending(self, update: Update) -> None:
        """An ending. Raises Breach where it is a second one, or none that this request may have."""
        request, ending = update.request, update.ending
        assert ending is not None
        request_id = request.request_id
        if self.open.pop(request_id, None) is None:
            raise Breach(f"request {request_id}: an ending ({ending.state.value}) for a request that is not open")
        if request.output_len != self.output_lens[request_id]:
            raise Breach(f"{request!r}: the client got {self.output_lens[request_id]} tokens")
        times = [time_s for _, time_s in request.history]
        if times != sorted(times):
            raise Breach(f"{request!r}: its states are not in order: {request.history}")
        why = self._why_not(request, ending.finish_reason)
        if why is not None:
            raise Breach(f"{request!r}, {ending.finish_reason or ending.error}: {why}")

    def _why_not(self, request: Request, reason: FinishReason | None) -> str | None:
        """What speaks against the way in which a request has ended."""
        request_id, output = request.request_id, request.output_len
        if request_id in self.cancelled and request.state is not RequestState.CANCELLED:
            return "its client had cancelled it"
        if request_id in self.completed and reason is not FinishReason.STOP:
            return "its text was complete"
        match request.state:
            case RequestState.CANCELLED if request_id not in self.cancelled:
                return "nobody cancelled it"
            case RequestState.FAILED if request_id not in self.broken:
                return "no step of it went wrong"
            case RequestState.TIMEOUT if not self._may_time_out(request):
                return "it had no deadline"
            case RequestState.REJECTED if output or request.admitted_s is not None:
                return "it had been admitted"
            case RequestState.COMPLETED if reason is FinishReason.STOP and request_id not in self.completed:
                if output < max(1, request.params.min_tokens) or int(request.tokens[-1]) not in request.end_tokens:
                    return "its last token is no end token"
            case RequestState.COMPLETED if (
                reason is FinishReason.LENGTH and request.device_len < request.max_device_len
            ):
                self.outgrown += 1
        return self._too_late(request)

    def _may_time_out(self, request: Request) -> bool:
        return (
            request.deadline_s is not None
            or (request.admitted_s is None and self._limits.queue_timeout_s is not None)
            or (request.admitted_s is not None and self._limits.request_timeout_s is not None)
        )

    def _too_late(self, request: Request) -> str | None:
        if self._tick_s is None or request.finished_s is None:
            return None
        latest = request.finished_s - self._tick_s - _SLACK_S
        timeout, admitted = self._limits.request_timeout_s, request.admitted_s
        if request.deadline_s is not None and latest > max(request.deadline_s, request.arrival_s):
            return f"its deadline was at {request.deadline_s:.3f} s, its end at {request.finished_s:.3f} s"
        if timeout is not None and admitted is not None and latest > admitted + timeout:
            return f"it ran for {request.finished_s - admitted:.3f} s"
        return None
