"""What `SamplingParams` accepts, and which field an error names."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft.core.errors import InvalidRequestError
from weft.core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

GOOD: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 1},
    {"max_new_tokens": 5, "min_tokens": 5},
    {"min_tokens": 1000},
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 0},
    {"min_p": 1.0},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 100},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
    {"logprobs": 0, "prompt_logprobs": MAX_TOP_LOGPROBS},
    {"stop": ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS},
    {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS))},
    {"logit_bias": {token: 100 for token in range(MAX_LOGIT_BIAS)}},
]

BAD: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_new_tokens": 0}),
    ("max_tokens", {"max_new_tokens": -1}),
    ("max_new_tokens", {"max_new_tokens": 1.0}),
    ("max_new_tokens", {"max_new_tokens": True}),
    ("max_new_tokens", {"max_new_tokens": 10**30}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"max_new_tokens": 2, "min_tokens": 3}),
    ("min_tokens", {"min_tokens": None}),
    ("min_tokens", {"min_tokens": 10**30}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 100.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": 10**400}),  # no float holds it
    ("temperature", {"temperature": "1"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": None}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("top_k", {"top_k": 10**30}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 101}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": -(2**63) - 1}),
    ("seed", {"seed": 0.5}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": MAX_TOP_LOGPROBS + 1}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": (1,)}),
    ("stop", {"stop": ("x",) * (MAX_STOP_STRINGS + 1)}),
    ("stop", {"stop": ("x" * (MAX_STOP_CHARS + 1),)}),
    ("stop_token_ids", {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))}),
    ("stop_token_ids or logit_bias", {"stop_token_ids": ("a",)}),
    ("stop_token_ids or logit_bias", {"stop_token_ids": (10**30,)}),
    ("logit_bias", {"logit_bias": {1: 100.1}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {1: "much"}}),
    ("logit_bias", {"logit_bias": {1: True}}),
    ("logit_bias", {"logit_bias": {token: 0 for token in range(MAX_LOGIT_BIAS + 1)}}),
]


@pytest.mark.parametrize("given", GOOD, ids=lambda given: ",".join(given) or "defaults")
def test_good(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    for name, value in given.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(("param", "given"), BAD)
def test_bad(param: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**given)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")
    assert "(allowed: " in caught.value.message
    assert caught.value.http_status == 400


def test_a_single_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_short_questions() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams().has_penalties
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).has_penalties  # type: ignore[arg-type]


def test_with_seed_checks_too() -> None:
    params = SamplingParams(temperature=0.5)
    assert params.with_seed(9) == SamplingParams(temperature=0.5, seed=9)
    with pytest.raises(InvalidRequestError):
        params.with_seed(2**64)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop_token_ids": (5, 100)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
    ],
)
def test_token_ids_beyond_the_vocabulary(given: dict[str, Any], param: str) -> None:
    params = SamplingParams(**given)
    with pytest.raises(InvalidRequestError) as caught:
        params.check_vocabulary(100)
    assert caught.value.param == param
    assert "0 to 99" in caught.value.message
    params = SamplingParams(stop_token_ids=(0, 99), logit_bias={99: -1.0})
    params.check_vocabulary(100)
