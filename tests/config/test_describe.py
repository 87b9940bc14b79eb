"""JSON round trip, masking, rows, and that the page in docs/ is current."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.docs.configuration import PAGE, render
from weft.config import Settings, describe, format_value, from_json, masked, resolve, to_json
from weft.config.schema import LEAVES
from weft.core.errors import SettingsError

SECRET = "sk-very-secret"


def test_json_round_trip_keeps_everything():
    settings = resolve(
        sets=[f"http.api_keys=[{SECRET}]", "kv_cache.max_items=7", "backend.fake.faults={raise_on_token: 3}"]
    ).settings
    assert from_json(to_json(settings)) == settings
    assert from_json(to_json(Settings())) == Settings()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(key=st.sampled_from(list(LEAVES)), value=JSON_VALUES)
def test_any_value_is_either_refused_or_survives_the_trip(key, value):
    try:
        settings = resolve(flags={key: value}).settings
    except SettingsError as error:
        assert key in error.message
    else:
        assert from_json(to_json(settings)) == settings


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"http": {"port": -1}}',
        b'{"http": {"prot": 1}}',
        b'{"scheduler": {"max_batch_size": 2}, "http": {"max_concurrent_requests": 1}}',
    ],
)
def test_bad_json(data):
    with pytest.raises(SettingsError):
        from_json(data)


def test_secrets_are_shown_nowhere():
    resolved = resolve(env={"WEFT_HTTP__API_KEYS": f"[{SECRET}, other]"})
    assert resolved.settings.http.api_keys == (SECRET, "other")
    assert SECRET not in repr(resolved)
    assert SECRET not in json.dumps(masked(resolved.settings))
    assert SECRET not in str(describe(resolved))
    assert masked(resolved.settings)["http"]["api_keys"] == ["***", "***"]
    with pytest.raises(SettingsError) as caught:
        resolve(sets=[f"http.api_keys=[{SECRET}, 1]"])
    assert SECRET not in str(caught.value)
    assert "http.api_keys: this value (not shown) is not allowed" in str(caught.value)


def test_masking_leaves_the_settings_alone():
    settings = resolve(sets=[f"http.api_keys={SECRET}"]).settings
    masked(settings)
    assert settings.http.api_keys == (SECRET,)


def test_rows():
    rows = {row.key: row for row in describe(resolve(flags={"http.port": 9, "backend.name": "fake"}))}
    assert list(rows) == list(LEAVES)
    assert rows["http.port"] == ("http.port", "9", "flag --port")
    assert rows["backend.name"] == ("backend.name", "fake", "flag --backend")
    assert rows["http.drain_s"].value == "30"
    assert rows["http.queue_timeout_s"].value == "null"
    assert rows["http.api_keys"].value == "[]"


def test_values_are_shown_as_a_file_has_them():
    values = ("auto", 1.5, 2.0, 3, None, False, ["***"], {})
    assert [format_value(value) for value in values] == ["auto", "1.5", "2", "3", "null", "false", '["***"]', "{}"]


def test_the_page_in_docs_is_current():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make docs"


def test_every_setting_is_described():
    for leaf in LEAVES.values():
        assert leaf.description.endswith("."), leaf.key
