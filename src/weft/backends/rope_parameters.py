"""Rotary embedding parameters, read from either way of writing them, and the frequencies that follow from them.

Two ways are in use: `rope_theta` beside `rope_scaling` (whose kind is called `type` or `rope_type`), and, since
transformers 5, one `rope_parameters` object. Free of tensor libraries; frequencies are float32 numpy arrays, because
the reference implementations compute them in float32.

Sources: RoFormer (Su et al., arXiv:2104.09864), position interpolation (Chen et al., arXiv:2306.15595), dynamic NTK
scaling (bloc97, 2023), YaRN (Peng et al., arXiv:2309.00071), Llama 3.1's rule (Grattafiori et al., arXiv:2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import ModelLoadError
from weft.core.plan import Float32s

DEFAULT_THETA = 10_000.0
SUPPORTED_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How positions turn into angles.

    Attributes:
        kind: "default", "linear", "dynamic", "llama3", "yarn", or the name of one that is not computed here.
        theta: base of the geometric series of wavelengths.
        factor: how far the context is stretched; 1.0 for "default".
        original_max_tokens: context that the model was trained on, before stretching.
        max_position_embeddings: as written in the configuration.
        partial: share of each head's width that turns.
        extra: the remaining numbers of the kind (`low_freq_factor`, `beta_fast`, ...).
    """

    kind: str
    theta: float
    factor: float
    original_max_tokens: int
    max_position_embeddings: int
    partial: float
    extra: Mapping[str, Any]

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial)

    def inverse_frequencies(self, head_dim: int) -> tuple[Float32s, float]:
        """Angles per position, float32 [rotary_dim / 2], and the factor on cosine and sine.

        For "dynamic" these are the frequencies within the original context; `dynamic_theta` has the rest.
        """
        dim = self.rotary_dim(head_dim)
        plain = _plain_frequencies(self.theta, dim)
        if self.kind == "linear":
            return plain / np.float32(self.factor), 1.0
        if self.kind == "llama3":
            return _llama3_frequencies(self, plain), 1.0
        if self.kind == "yarn":
            return _yarn_frequencies(self, dim, plain), _yarn_attention_factor(self)
        return plain, 1.0

    def dynamic_theta(self, seq_len: int, head_dim: int) -> float:
        """Base for a sequence of `seq_len` tokens under dynamic NTK scaling."""
        dim = self.rotary_dim(head_dim)
        length = max(seq_len, self.max_position_embeddings)
        stretch = self.factor * length / self.max_position_embeddings - (self.factor - 1)
        return float(self.theta * stretch ** (dim / (dim - 2)))


def normalise_rope(
    text: Mapping[str, Any], source: Path, default_theta: float = DEFAULT_THETA
) -> RopeParameters | None:
    """Reads either way of writing; None where there are none or where they differ between layer types.

    `source` is named in errors; `default_theta` is the family's, for a configuration that is silent about it.
    """
    new, old = text.get("rope_parameters"), text.get("rope_scaling")
    values: dict[str, Any] = {**(old if isinstance(old, dict) else {}), **(new if isinstance(new, dict) else {})}
    if any(isinstance(value, dict) for value in values.values()):
        return None
    theta = values.get("rope_theta", text.get("rope_theta"))
    if not values and theta is None and "max_position_embeddings" not in text:
        return None
    kind = values.get("rope_type", values.get("type", "default"))
    limit = int(text.get("max_position_embeddings") or 0)
    original = text.get("original_max_position_embeddings", values.get("original_max_position_embeddings", limit))
    factor = values.get("factor")
    if factor is None:
        factor = limit / original if kind == "yarn" and original else 1.0
    partial = values.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    known = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
    try:
        return RopeParameters(
            kind=str(kind),
            theta=float(default_theta if theta is None else theta),
            factor=float(factor),
            original_max_tokens=int(original or limit),
            max_position_embeddings=limit,
            partial=float(1.0 if partial is None else partial),
            extra={key: value for key, value in values.items() if key not in known},
        )
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{source}: rope parameters cannot be read: {error}") from error


def scaled_context(max_position_embeddings: int, rope: RopeParameters | None) -> int:
    """Longest sequence. Only the kinds whose limit is written before stretching are stretched here."""
    if rope is None:
        return max_position_embeddings
    if rope.kind in ("linear", "dynamic"):
        return int(max_position_embeddings * rope.factor)
    if rope.kind == "yarn":
        return max(max_position_embeddings, int(rope.original_max_tokens * rope.factor))
    return max_position_embeddings


def _plain_frequencies(theta: float, dim: int) -> Float32s:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float32)


def _llama3_frequencies(rope: RopeParameters, plain: Float32s) -> Float32s:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    wavelengths = 2 * math.pi / plain
    smooth = (rope.original_max_tokens / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = np.where(wavelengths > rope.original_max_tokens / low, plain / rope.factor, between)
    frequencies: Float32s = np.where(wavelengths < rope.original_max_tokens / high, plain, stretched).astype(np.float32)
    return frequencies


def _yarn_frequencies(rope: RopeParameters, dim: int, plain: Float32s) -> Float32s:
    """Interpolates the dimensions that turn rarely, keeps those that turn often, ramps between (YaRN, section 3.2)."""

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(float(rope.extra.get("beta_fast") or 32))
    high = dimension(float(rope.extra.get("beta_slow") or 1))
    if rope.extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    frequencies: Float32s = (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return frequencies


def _yarn_attention_factor(rope: RopeParameters) -> float:
    """YaRN, section 3.4, with DeepSeek's two `mscale` numbers where given."""
    given = rope.extra.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    mscale, all_dim = rope.extra.get("mscale"), rope.extra.get("mscale_all_dim")
    if mscale and all_dim:
        return scale(float(mscale)) / scale(float(all_dim))
    return scale(1.0)


def _number(rope: RopeParameters, key: str) -> float:
    value = rope.extra.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelLoadError(f"rope parameters of kind {rope.kind!r}: {key} is missing or not a number ({value!r})")
    return float(value)
