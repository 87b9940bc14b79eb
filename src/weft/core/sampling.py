"""Sampling parameters of one request, checked once on arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.errors import InvalidRequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 2048
MAX_TOP_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Processing order, as in vLLM: logit bias, `min_tokens` mask, penalties, temperature, min-p, top-k, top-p.
    Log probabilities are those of the model's own distribution, before any of these.

    Attributes:
        max_new_tokens: hard limit on generated tokens; None: as many as context and cache allow.
        min_tokens: end tokens and stop token ids cannot be chosen before so many tokens.
        temperature: 0 is greedy.
        top_k: 0 or -1: off.
        seed: fixes the text of this request whatever else is in the batch; None: drawn from the engine's own seed.
        logprobs: None: off; k >= 0: the chosen token's log probability and the k best.
        prompt_logprobs: the same for the prompt's tokens (turns prefix reuse off for this request).
        stop: strings that end the text; not part of it unless `include_stop`.
        embed: the vector of the prompt is wanted, and no token; all else here then means nothing.
    """

    max_new_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    embed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # the one mistake everybody makes
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_kinds()
        self._check_ranges()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError where a token id lies beyond the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequestError(
                        f"{name}: token id {token} is not in the vocabulary (allowed: 0 to {vocab_size - 1})",
                        param=name,
                    )

    def _check_kinds(self) -> None:
        numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in numbers:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
                _refuse(name, value, "a finite number")
        for name in ("min_tokens", "top_k"):
            if not _is_int(getattr(self, name)):
                _refuse(name, getattr(self, name), "a 64-bit whole number")
        for name in ("max_new_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not _is_int(value):
                _refuse(name, value, "a 64-bit whole number or null")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "non-empty strings")
        for token in (*self.stop_token_ids, *self.logit_bias):
            if not _is_int(token):
                _refuse("stop_token_ids or logit_bias", token, "whole token ids")

    def _check_ranges(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            _refuse("max_tokens", self.max_new_tokens, "at least 1")
        if self.min_tokens < 0 or (self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens):
            _refuse("min_tokens", self.min_tokens, "0 to max_tokens")
        _check_between("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 < self.top_p <= 1.0:
            _refuse("top_p", self.top_p, "above 0, at most 1")
        if self.top_k < -1:
            _refuse("top_k", self.top_k, "-1 or 0 (off) or a positive number")
        _check_between("min_p", self.min_p, 0.0, 1.0)
        _check_between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 100.0:
            _refuse("repetition_penalty", self.repetition_penalty, "above 0, at most 100")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_between(name, value, 0, MAX_TOP_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if len(text) > MAX_STOP_CHARS:
                _refuse("stop", f"a string of {len(text)} characters", f"at most {MAX_STOP_CHARS}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        for bias in self.logit_bias.values():
            if isinstance(bias, bool) or not isinstance(bias, (int, float)):
                _refuse("logit_bias", bias, "numbers")
            _check_between("logit_bias", bias, -100.0, 100.0)


def _is_int(value: Any) -> bool:
    """A whole number of 64 bits, signed or not: what travels between processes."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _check_between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        _refuse(name, value, f"{low} to {high}")


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise InvalidRequestError(f"{name}: {value!r} is not allowed (allowed: {allowed})", param=name)
