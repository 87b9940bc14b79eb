"""Whether a request can be served at all, and when one has taken too long."""

from __future__ import annotations

from weft.core.errors import InvalidRequestError
from weft.core.plan import Int32s
from weft.core.request import Request, end_tokens
from weft.core.sampling import SamplingParams
from weft.scheduler.limits import Limits


class Admission:
    """The limits of one request.

    Args:
        limits: the scheduler's.
        max_context_tokens: longest sequence of the model.
        capacity: tokens that the KV cache holds; one request may have all of them.
        vocab_size: token ids are below it.
        eos_token_ids: end tokens of the model.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_context_tokens: int,
        capacity: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.max_context_tokens = max_context_tokens
        self.vocab_size = vocab_size
        self._limits = limits
        self._capacity = capacity
        self._max_len = min(max_context_tokens, capacity)
        self._eos_token_ids = eos_token_ids

    def max_device_len(self, prompt_ids: Int32s, params: SamplingParams) -> int:
        """Most tokens, prompt and output, of such a request. Raises InvalidRequestError where it cannot be served."""
        params.check_vocabulary(self.vocab_size)
        length = len(prompt_ids)
        self._check_prompt(prompt_ids, room=0 if params.embed else 1)
        if params.embed:
            return length
        wanted = params.max_new_tokens
        room = self.max_context_tokens - length
        if wanted is not None and wanted > room:
            raise InvalidRequestError(
                f"max_tokens: {length} prompt tokens and {wanted} new ones exceed the context of"
                f" {self.max_context_tokens} tokens (allowed: at most {room} new ones)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        max_output = self._limits.max_output_tokens
        if wanted is not None and max_output is not None and wanted > max_output:
            raise InvalidRequestError(
                f"max_tokens: {wanted} is not allowed (allowed: at most {max_output})", param="max_tokens"
            )
        limit = room if wanted is None else wanted
        if max_output is not None:
            limit = min(limit, max_output)
        return min(length + limit, self._max_len)

    def check_resumed(self, resume_ids: Int32s, params: SamplingParams, room: int) -> None:
        """Whether a request with `room` tokens to generate may go on after these. Raises InvalidRequestError."""
        if params.embed or params.prompt_logprobs is not None:
            what = "an embedding" if params.embed else "log probabilities of the prompt"
            raise InvalidRequestError(f"weft_resume: not allowed with {what}", param="weft_resume")
        if len(resume_ids) > room:
            raise InvalidRequestError(
                f"weft_resume: it has {len(resume_ids)} tokens, but at most {room} can be generated for this request"
                f" (its limit, context {self.max_context_tokens} tokens, KV cache {self._capacity} tokens)",
                param="weft_resume",
                code="context_length_exceeded",
            )
        ends = end_tokens(params, self._eos_token_ids)
        for index, token in enumerate(resume_ids.tolist()):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"weft_resume: token id {token} is not in the vocabulary (allowed: 0 to {self.vocab_size - 1})",
                    param="weft_resume",
                )
            if token in ends and index >= params.min_tokens:
                raise InvalidRequestError(
                    f"weft_resume: token id {token} ends an answer; nothing is generated after it", param="weft_resume"
                )

    def _check_prompt(self, prompt_ids: Int32s, room: int) -> None:
        """`room`: tokens that have to follow."""
        length = len(prompt_ids)
        if length == 0:
            raise InvalidRequestError("prompt: it is empty (at least one token is needed)", param="prompt")
        low, high = int(prompt_ids.min()), int(prompt_ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"prompt: token id {bad} is not in the vocabulary (allowed: 0 to {self.vocab_size - 1})", param="prompt"
            )
        max_input = min(self._max_len - room, self._limits.max_input_tokens or self._max_len)
        if length > max_input:
            raise InvalidRequestError(
                f"prompt: it has {length} tokens, but at most {max_input} are allowed"
                f" (context {self.max_context_tokens} tokens, KV cache {self._capacity} tokens)",
                param="prompt",
                code="context_length_exceeded",
            )


def overdue(request: Request, now_s: float, limits: Limits, least_s: float) -> str | None:
    """Why a request has to end now, or None; `least_s` is the least that its uncached prompt still takes.

    Whoever cannot meet its deadline any more is ended before its prompt is computed, not after.
    """
    end_s = now_s + least_s
    if request.deadline_s is not None and (now_s >= request.deadline_s or end_s > request.deadline_s):
        if now_s >= request.deadline_s:
            return f"timeout_s: the request's own deadline passed after {now_s - request.arrival_s:.1f} s"
        return (
            f"timeout_s: {request.deadline_s - now_s:.1f} s before its deadline the prompt still takes"
            f" at least {least_s:.1f} s"
        )
    if request.admitted_s is None:
        limit = limits.queue_timeout_s
        if limit is not None and now_s - request.arrival_s >= limit:
            return f"the request waited longer than http.queue_timeout_s ({limit} s)"
        return None
    limit = limits.request_timeout_s
    if limit is not None and end_s - request.admitted_s >= limit:
        if now_s - request.admitted_s >= limit:
            return f"the request ran longer than http.request_timeout_s ({limit} s)"
        return (
            f"the prompt still takes at least {least_s:.1f} s, which http.request_timeout_s ({limit} s) does not leave"
        )
    return None
