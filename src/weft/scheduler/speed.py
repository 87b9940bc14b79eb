"""How fast the engine has been lately: what `Retry-After` and hopeless deadlines are computed from."""

from __future__ import annotations

from collections import deque

from weft.core.plan import StepMode

WINDOW_STEPS = 64
MIN_PROMPT_STEPS, MIN_PROMPT_TOKENS = 4, 32
"""The speed of prompts is not known before so many steps with so many tokens each: the first ones warm up."""

FIRST_STEP_TOKENS, MIN_STEP_TOKENS = 16, 4
"""Prompt tokens beside running streams while no speed is known, and however slow the engine is."""

MARGIN = 2.0
"""A prompt may go so much faster than the best step measured, before it is taken for hopeless."""
MIN_S, MAX_S = 1.0, 60.0
_KEEP = 0.95  # of an average, per further measurement
_AIM = 0.8
"""Of the time that a step may take, the rest is for what no measurement foretells."""
_RISE = 0.25
"""So much of a better measurement is believed at once; a worse one wholly."""
_LEAST_SHARE = 0.25
"""Prompt tokens take at least this share of a mixed step, and may."""


class Speed:
    """Measured over steps of any mode; times are of the scheduler's clock."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        self._prompt_speeds: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._tokens = 0
        self._seconds = 0.0
        self._mean_output: float | None = None
        self._prompt_rate: float | None = None
        self._decode_s: float | None = None

    def note_step(self, mode: StepMode, tokens: int, seconds: float, prompt_tokens: int = 0) -> None:
        """A step computed so many tokens, prompt and output alike; the prompts' share of them."""
        if seconds <= 0:
            return
        if mode == "decode":
            self._decode_s = seconds if self._decode_s is None else (self._decode_s + seconds) / 2
        elif prompt_tokens >= MIN_STEP_TOKENS:
            self._note_prompts(prompt_tokens, seconds, self._decode_s or 0.0 if mode == "mixed" else 0.0)
            if tokens >= MIN_PROMPT_TOKENS:
                self._prompt_speeds.append(tokens / seconds)
        if len(self._steps) == WINDOW_STEPS:
            old_tokens, old_seconds = self._steps[0]
            self._tokens -= old_tokens
            self._seconds -= old_seconds
        self._steps.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds

    def note_ending(self, output_tokens: int) -> None:
        """A request that ran has ended."""
        before = output_tokens if self._mean_output is None else self._mean_output
        self._mean_output = _KEEP * before + (1 - _KEEP) * output_tokens

    def prompt_tokens_in(self, seconds: float) -> int:
        """Prompt tokens for a step that is to take so long, its decode rows included; at least `MIN_STEP_TOKENS`.

        What the decode rows take is what a decode step took lately; half of the step while there was none. Where they
        leave little or nothing of `seconds`, prompts take `_LEAST_SHARE` of their time on top.
        """
        if self._prompt_rate is None:
            return FIRST_STEP_TOKENS
        aim_s = seconds * _AIM
        decode_s = aim_s / 2 if self._decode_s is None else self._decode_s
        return max(MIN_STEP_TOKENS, int(self._prompt_rate * max(aim_s - decode_s, decode_s * _LEAST_SHARE)))

    def least_seconds(self, prompt_tokens: int) -> float:
        """The least that a prompt of so many uncached tokens takes; 0 while that is not known."""
        if len(self._prompt_speeds) < MIN_PROMPT_STEPS:
            return 0.0
        return prompt_tokens / (MARGIN * max(self._prompt_speeds))

    def retry_after_s(self, requests: int, uncached_tokens: int) -> float:
        """How long until half of so many waiting requests are worked off, between `MIN_S` and `MAX_S`.

        Half: whoever comes back when a single place is free finds that others were faster.
        """
        return min(MAX_S, max(MIN_S, self.work_s(requests, uncached_tokens) / 2))

    def work_s(self, requests: int, uncached_tokens: int) -> float:
        """How long so many requests take, worked off at the speed of late; 0 while that is not known."""
        if not self._tokens or self._seconds <= 0:
            return 0.0
        return (uncached_tokens + requests * (self._mean_output or 0.0)) * self._seconds / self._tokens

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """How fast prompts are computed; None while that is not known."""
        return self._prompt_rate

    def _note_prompts(self, prompt_tokens: int, seconds: float, decode_s: float) -> None:
        """How fast prompt tokens went, beside decode rows that take `decode_s`."""
        rate = prompt_tokens / max(seconds - decode_s, seconds * _LEAST_SHARE)
        before = self._prompt_rate
        self._prompt_rate = rate if before is None or rate < before else before + _RISE * (rate - before)
