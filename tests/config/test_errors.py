"""Every kind of refusal names the key, the value and what is allowed."""

from __future__ import annotations

import re

import pytest

from weft.config import resolve
from weft.config.schema import NOT_YET, NOT_YET_VALUES
from weft.core.errors import SettingsError


def refusal(*sets: str, **sources) -> str:
    with pytest.raises(SettingsError) as caught:
        resolve(sets=sets, **sources)
    return caught.value.message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("http.port=x", "http.port: 'x' is not allowed; allowed: integer from 0 to 65535 (--set)"),
        ("http.port=70000", "http.port: 70000 is not allowed; allowed: integer from 0 to 65535 (--set)"),
        ("http.port=true", "http.port: true is not allowed; allowed: integer from 0 to 65535 (--set)"),
        ("http.port=", "http.port: null is not allowed; allowed: integer from 0 to 65535 (--set)"),
        ("http.port=80.5", "http.port: 80.5 is not allowed; allowed: integer from 0 to 65535 (--set)"),
        ("http.host=", "http.host: null is not allowed; allowed: text (--set)"),
        ("log.level=loud", "log.level: 'loud' is not allowed; allowed: debug, error, info or warning (--set)"),
        ("scheduler.mixed=1", "scheduler.mixed: 1 is not allowed; allowed: true or false (--set)"),
        ("scheduler.deadline_scan_s=6", "scheduler.deadline_scan_s: 6 is not allowed; allowed: number from 0.5 to 5"),
        ("http.drain_s=.nan", "http.drain_s: nan is not allowed; allowed: number from 0 to 31536000"),
        ("http.sse_keep_alive_s=.inf", "http.sse_keep_alive_s: inf is not allowed; allowed: number above 0 up to"),
        (
            "kv_cache.max_items=0",
            "kv_cache.max_items: 0 is not allowed; allowed: integer from 1 to 1099511627776 or auto",
        ),
        ("kv_cache.max_items=" + "9" * 30, "is not allowed; allowed: integer from 1 to 1099511627776 or auto"),
        ("kv_cache.page_size=3", "kv_cache.page_size: 3 is not allowed; allowed: 1, 2, 4, 8, 16, 32, 64, 128 or 256"),
        ("kv_cache.page_size=512", "kv_cache.page_size: 512 is not allowed"),
        ("backend.fake.faults=3", "backend.fake.faults: 3 is not allowed; allowed: mapping of fault to token id"),
        ("backend.fake.faults={a: x}", "backend.fake.faults: {'a': 'x'} is not allowed"),
        ("model.path=/\udcff", "model.path: '/\\udcff' is not allowed; allowed: text or null"),
    ],
)
def test_wrong_values(setting, message):
    assert message in refusal(setting)


def test_a_long_value_is_cut():
    assert len(refusal("http.port=" + "x" * 10_000)) < 250


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("http.prot=1", "unknown setting http.prot (--set); did you mean http.port?"),
        ("port=1", "unknown setting port (--set); did you mean http.port?"),
        ("scheduler.page_size=1", "did you mean kv_cache.page_size?"),
        ("kvcache.page_size=1", "did you mean kv_cache.page_size?"),
        ("backend.quantise=1", "did you mean backend.quantize (not available in this version)?"),
        (
            "backend.torch.zzz=1",
            "unknown setting backend.torch.zzz (--set); backend.torch has device, attention, threads",
        ),
        ("zzz.yyy=1", "unknown setting zzz.yyy (--set); sections are model, http, scheduler, kv_cache, text, backend,"),
        ("http.port.x=1", "unknown setting http.port.x"),
        ("http.request_timeout=1", "did you mean http.request_timeout_s?"),
        ("bakend=1", "did you mean backend?"),
        ("backend.torch=cpu", "backend.torch is a section, not a value; it has device, attention, threads (--set)"),
        ("http.port", "--set http.port: must be section.key=value"),
        ("=1", "unknown setting  (--set)"),
    ],
)
def test_unknown_keys(setting, message):
    assert message in refusal(setting)


def test_a_section_as_a_flag():
    assert "http is a section, not a value" in refusal(flags={"http": 1})


@pytest.mark.parametrize("name", NOT_YET)
def test_promised_keys_that_are_not_there_yet(name):
    assert refusal(f"{name}=1") == f"{name}: not available in this version (--set)"
    assert refusal(f"{name}.inner=1") == f"{name}: not available in this version (--set)"


def test_promised_flags_that_are_not_there_yet():
    assert refusal(flags={"backend.torch.tp": 2}) == "backend.torch.tp: not available in this version (flag --tp)"


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in NOT_YET_VALUES.items() for v in values])
def test_promised_values_that_are_not_there_yet(key, value):
    assert refusal(f"{key}={value}").startswith(f"{key}: '{value}' is not available in this version; allowed: ")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WEFT_HTP__PORT": "1"}, "unknown setting htp.port (environment WEFT_HTP__PORT); did you mean http.port?"),
        ({"WEFT_HTTP_PORT": "1"}, "environment WEFT_HTTP_PORT: did you mean WEFT_HTTP__PORT?"),
        ({"WEFT_http__port": "1"}, "environment WEFT_http__port: did you mean WEFT_HTTP__PORT?"),
        (
            {"WEFT_BACKEND__DETERMINISTIC": "1"},
            "backend.deterministic: not available in this version (environment WEFT_BACK",
        ),
        ({"WEFT_HTTP__PORT": "x"}, "http.port: 'x' is not allowed"),
    ],
)
def test_the_environment(env, message):
    assert message in refusal(env=env)


def test_an_error_in_a_lower_source_counts_even_when_a_higher_one_replaces_the_value():
    assert "http.port: 'x'" in refusal("http.port=1", env={"WEFT_HTTP__PORT": "x"})


def test_errors_carry_the_key():
    with pytest.raises(SettingsError) as caught:
        resolve(flags={"http.port": "8000"})
    assert caught.value.param == "http.port"
    assert "flag --port" in caught.value.message


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("scheduler.max_batch_size=16", "http.max_concurrent_requests=8"),
            "scheduler.max_batch_size 16 > http.max_concurrent_requests 8",
        ),
        (
            ("scheduler.chunked_prefill_size=512", "scheduler.max_prefill_tokens=256"),
            "scheduler.chunked_prefill_size 512 > scheduler.max_prefill_tokens 256",
        ),
        (("kv_cache.page_size=16", "kv_cache.max_items=8"), "kv_cache.page_size 16 > kv_cache.max_items 8"),
        (
            ("scheduler.max_input_tokens=9", "model.max_context_tokens=8"),
            "scheduler.max_input_tokens 9 > model.max_context_tokens 8",
        ),
        (
            ("scheduler.max_output_tokens=9", "kv_cache.max_items=8"),
            "scheduler.max_output_tokens 9 > kv_cache.max_items 8",
        ),
    ],
)
def test_contradictions_name_both_keys(sets, message):
    assert re.match(re.escape(message), refusal(*sets))
    resolve(sets=sets[:1])
    resolve(sets=sets[1:])


def test_the_edge_of_a_contradiction_is_none():
    resolve(
        sets=[
            "scheduler.max_batch_size=8",
            "http.max_concurrent_requests=8",
            "scheduler.chunked_prefill_size=16",
            "scheduler.max_prefill_tokens=16",
            "kv_cache.page_size=16",
            "kv_cache.max_items=16",
            "scheduler.max_input_tokens=16",
            "model.max_context_tokens=16",
        ]
    )
