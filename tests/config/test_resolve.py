"""Order of the sources, and how each of them is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from weft.config import Settings, resolve
from weft.config.schema import LEAVES, NOT_YET, SECTIONS, not_yet
from weft.core.errors import SettingsError


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        file = tmp_path / "x.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return _write


def test_nothing_given_is_the_defaults():
    resolved = resolve()
    assert resolved.settings == Settings()
    assert list(resolved.sources) == list(LEAVES)
    assert set(resolved.sources.values()) == {"default"}


def test_each_source_beats_the_one_before(write):
    file = write("http: {host: f, port: 1, drain_s: 2, max_queue_size: 3, max_body_bytes: 4096}")
    env = {"WEFT_HTTP__PORT": "11", "WEFT_HTTP__DRAIN_S": "12", "WEFT_HTTP__MAX_QUEUE_SIZE": "13"}
    resolved = resolve(
        file=file, env=env, flags={"http.port": 21, "http.drain_s": 22}, sets=["http.port=31", "http.port=32"]
    )
    http = resolved.settings.http
    assert (http.port, http.drain_s, http.max_queue_size, http.max_body_bytes, http.host) == (32, 22, 13, 4096, "f")
    assert {key: resolved.sources[f"http.{key}"] for key in ("port", "max_queue_size", "host", "sse_keep_alive_s")} == {
        "port": "--set",
        "max_queue_size": "environment WEFT_HTTP__MAX_QUEUE_SIZE",
        "host": f"file {file}",
        "sse_keep_alive_s": "default",
    }


def test_a_flag_not_given_changes_nothing():
    resolved = resolve(env={"WEFT_HTTP__PORT": "9"}, flags={"http.port": None, "http.host": "::1", "model.path": "m"})
    assert resolved.settings.http.port == 9
    assert resolved.sources["http.host"] == "flag --host"
    assert resolved.sources["model.path"] == "argument MODEL"


def test_a_file_may_be_empty_and_so_may_a_section(write):
    assert resolve(file=write("")).settings == Settings()
    assert resolve(file=write("# nothing\nhttp:\nbackend: {torch: }\n")).settings == Settings()


def test_anchors_and_merges_work_in_a_file(write):
    file = write("backend:\n  torch: {<<: &t {threads: 2}, device: cpu}\n")
    torch = resolve(file=file).settings.backend.torch
    assert (torch.threads, torch.device) == (2, "cpu")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("scheduler.chunked_prefill_size=null", "scheduler.chunked_prefill_size", None),
        ("scheduler.chunked_prefill_size=auto", "scheduler.chunked_prefill_size", "auto"),
        ("scheduler.mixed=off", "scheduler.mixed", False),
        ("http.drain_s=0", "http.drain_s", 0.0),
        ("http.request_timeout_s=null", "http.request_timeout_s", None),
        ("model.path=123", "model.path", "123"),
        ("model.path=null", "model.path", None),
        ("model.served_name=[x", "model.served_name", "[x"),
        ("model.served_name=2024-13-45", "model.served_name", "2024-13-45"),
        ("model.served_name=" + "[" * 3000, "model.served_name", "[" * 3000),
        ("model.served_name=a=b", "model.served_name", "a=b"),
        ("http.api_keys=[a, b]", "http.api_keys", ("a", "b")),
        ("http.api_keys=12345", "http.api_keys", ("12345",)),
        ("backend.torch={device: cpu}", "backend.torch.device", "cpu"),
        ("backend.fake.faults={raise_on_token: 3}", "backend.fake.faults", {"raise_on_token": 3}),
    ],
)
def test_values_from_text_are_read_as_yaml_and_then_as_text(text, key, value):
    node = resolve(sets=[text]).settings
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_every_key_can_be_set_from_the_environment():
    env = {leaf.env: yaml.safe_dump(leaf.default) for leaf in LEAVES.values()}
    resolved = resolve(env=env)
    assert resolved.settings == Settings()
    assert all(resolved.sources[key] == f"environment {leaf.env}" for key, leaf in LEAVES.items())


def test_other_variables_are_left_alone():
    env = {"WEFT_PORT": "tcp://10.0.0.1:80", "WEFT_SERVICE_HOST": "10.0.0.1", "PATH": "/bin", "X_WEFT_HTTP__PORT": "1"}
    assert resolve(env=env).settings == Settings()


def test_the_tree_is_frozen():
    with pytest.raises(AttributeError):
        resolve().settings.http.port = 1  # type: ignore[misc]


def test_no_key_is_both_there_and_not_there():
    assert not [key for key in (*LEAVES, *SECTIONS) if not_yet(key)]
    assert len(set(NOT_YET)) == len(NOT_YET)


def test_unreadable_files(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"nope\.yaml cannot be read: No such file"):
        resolve(file=tmp_path / "nope.yaml")
    with pytest.raises(SettingsError, match="cannot be read"):
        resolve(file=tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: \xe9}")
    with pytest.raises(SettingsError, match=r"latin\.yaml is not UTF-8 text \(byte 14\)"):
        resolve(file=tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http:\n  port: [1\n", "x.yaml, line 3: not valid YAML"),
        ("http: {port: 1}\n---\nlog: {}\n", "line 2: not valid YAML"),
        ("http: !!python/object:os.system {}\n", "line 1: not valid YAML"),
        ("http: {port: *other}\n", "line 1: not valid YAML: found undefined alias"),
        ("model: {served_name: 2024-13-45}\n", "not valid YAML: month must be in 1..12"),
        ("http: {host: \x07}\n", "not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("- http\n", "settings are a mapping of sections"),
        ("http:\n  port: 1\n  host: a\n  port: 2\n", r"line 4: http.port is already set on line 2"),
        ("log: {}\nhttp: {}\nlog: {}\n", "line 3: log is already set on line 1"),
        ("backend:\n  fake:\n    faults: &f {a: 1, b: *f}\n", "line 3: an anchor that contains itself"),
        (
            "http:\n  port: 0x\n",
            r"http.port: '0x' is not allowed; allowed: integer from 0 to 65535 \(file .*, line 2\)",
        ),
        (
            "http:\n  host: a\n  prot: 1\n",
            r"unknown setting http.prot \(file .*x.yaml, line 3\); did you mean http.port\?",
        ),
        ("http: 8000\n", r"http is a section, not a value; it has host, port, .* \(file .*, line 1\)"),
        ("1: 2\n", r"unknown setting 1 .*; sections are model, http, scheduler"),
    ],
)
def test_malformed_files(write, text, message):
    with pytest.raises(SettingsError, match=message):
        resolve(file=write(text))
