"""Changes the sample rate of audio."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

import numpy as np

from weft.core.plan import Float32s

_ZEROS = 16
"""Zero crossings of the sinc on each side."""

_ROLLOFF = 0.95  # of the lower rate's limit, so that the filter has room to fall
_BETA = 8.0  # of the Kaiser window


def resampled(samples: Float32s, rate: int, new_rate: int) -> Float32s:
    """`samples` float32 [n] at `rate` as float32 [ceil(n * new_rate / rate)] at `new_rate`; both per second.

    A polyphase filter with a windowed sinc. Silence is assumed before and after.
    """
    if rate == new_rate or not len(samples):
        return samples
    up, down = new_rate // gcd(rate, new_rate), rate // gcd(rate, new_rate)
    kernels = _kernels(up, down)
    taps = kernels.shape[1]
    length = ceil(len(samples) * up / down)
    padded = np.pad(samples, (taps // 2 - 1, taps + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    result = np.empty(length, np.float32)
    for phase in range(min(up, length)):
        out = result[phase::up]
        start = phase * down // up
        out[:] = windows[start::down][: len(out)] @ kernels[phase]
    return result


@lru_cache(maxsize=8)
def _kernels(up: int, down: int) -> Float32s:
    """The filter at each of the `up` places between two samples: float32 [up, taps], each row of sum 1."""
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = ceil(_ZEROS / cutoff)
    fractions = (np.arange(up) * down % up / up)[:, None]
    distances = np.arange(1 - half, half + 1)[None, :] - fractions
    window = np.i0(_BETA * np.sqrt(np.maximum(0.0, 1 - (distances / half) ** 2)))
    kernels = np.sinc(cutoff * distances) * window
    result: Float32s = (kernels / kernels.sum(axis=1, keepdims=True)).astype(np.float32)
    return result
