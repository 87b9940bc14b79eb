"""Rotary parameters: both ways of writing, and frequencies against formulas written out one dimension at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from weft.backends.rope_parameters import RopeParameters, normalise_rope
from weft.core.errors import ModelLoadError

SOURCE = Path("config.json")


def rope(values: dict[str, Any], **text: Any) -> RopeParameters:
    found = normalise_rope({"max_position_embeddings": 64, "rope_parameters": values, **text}, SOURCE)
    assert found is not None
    return found


def test_both_ways_of_writing_agree() -> None:
    new = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    old = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    text = {"max_position_embeddings": 64, "rope_theta": 500.0, "rope_scaling": old}
    assert normalise_rope(text, SOURCE) == rope(new)
    assert rope(new).original_max_tokens == 64
    assert rope({}, original_max_position_embeddings=16).original_max_tokens == 16


def test_defaults_and_absence() -> None:
    plain = normalise_rope({"max_position_embeddings": 64}, SOURCE)
    assert plain is not None and plain.kind == "default" and plain.theta == 10_000.0
    assert normalise_rope({"max_position_embeddings": 64}, SOURCE, 1e6).theta == 1e6  # type: ignore[union-attr]
    assert normalise_rope({}, SOURCE) is None
    nested = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    assert normalise_rope(nested, SOURCE) is None
    assert rope({"rope_type": "default"}, partial_rotary_factor=0.5).rotary_dim(16) == 8


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ModelLoadError, match=r"config.json: rope parameters cannot be read"):
        rope({"rope_type": "linear", "factor": "much"})
    with pytest.raises(ModelLoadError, match="low_freq_factor is missing or not a number"):
        rope({"rope_type": "llama3", "factor": 8.0}).inverse_frequencies(16)


def test_plain_and_linear() -> None:
    frequencies, factor = rope({"rope_theta": 100.0}).inverse_frequencies(8)
    assert frequencies.tolist() == pytest.approx([100.0 ** (-2 * i / 8) for i in range(4)]) and factor == 1.0
    halved, _ = rope({"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}).inverse_frequencies(8)
    assert (halved * 2).tolist() == pytest.approx(frequencies.tolist())


def test_llama3() -> None:
    values = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    frequencies, _ = rope(values).inverse_frequencies(16)
    expected = []
    for i in range(8):
        f = 500.0 ** (-2 * i / 16)
        length = 2 * math.pi / f
        if length > 32 / 1.0:
            f = f / 8
        elif length >= 32 / 4.0:
            smooth = (32 / length - 1) / 3
            f = (1 - smooth) * f / 8 + smooth * f
        expected.append(f)
    assert frequencies.tolist() == pytest.approx(expected)
    assert len({round(e * 500.0 ** (2 * i / 16), 3) for i, e in enumerate(expected)}) > 2  # all three branches


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones() -> None:
    values = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
    yarn = rope(values)
    frequencies, factor = yarn.inverse_frequencies(64)
    plain = [10_000.0 ** (-2 * i / 64) for i in range(32)]
    ratios = [p / f for p, f in zip(plain, frequencies.tolist(), strict=True)]
    assert ratios[0] == pytest.approx(1) and ratios[-1] == pytest.approx(4)
    assert all(later > earlier - 1e-6 for earlier, later in pairwise(ratios))
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope({**values, "attention_factor": 1.5}).inverse_frequencies(64)[1] == 1.5


def test_dynamic_theta_grows_beyond_the_trained_context() -> None:
    dynamic = rope({"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})
    assert dynamic.dynamic_theta(10, 16) == dynamic.dynamic_theta(64, 16) == pytest.approx(100.0)
    assert dynamic.dynamic_theta(128, 16) == pytest.approx(100.0 * 3 ** (16 / 14))
