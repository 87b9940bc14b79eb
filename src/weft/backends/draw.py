"""Random draws that depend on a request's own seed and position alone.

One uniform number per (seed, output index), from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) used as a counter-based generator: no state, so the same request draws the same
numbers whatever else is in its batch and wherever it resumes. Shared by the samplers of all backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in (0, 1), fixed by `seed` (any 64-bit number, signed or not) and `index` (0 or more)."""
    # The seed is mixed before counting, so that neighbouring seeds do not walk the same sequence shifted by one.
    key = _mix(((seed & MASK) + GOLDEN_GAMMA) & MASK)
    bits = _mix((key + (index + 1) * GOLDEN_GAMMA) & MASK)
    return ((bits >> 12) + 0.5) * 2.0**-52  # 52 bits: with 53 the largest would round to 1.0


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """`uniform` for each pair; float64 [len(seeds)]."""
    return np.array([uniform(seed, index) for seed, index in zip(seeds, indices, strict=True)], np.float64)
