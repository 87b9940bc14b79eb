"""The `weft` commands that need no server, run in this process over the fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.launch.worker import Worker
from weft.cli import app
from weft.commands.chat import ServerTalker, run_chat
from weft.core.sampling import SamplingParams

FAKE = ("--backend", "fake")


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_generate_prints_one_completion() -> None:
    first = run("generate", *FAKE, "--prompt", "Once", "--max-tokens", "12")
    assert first.exit_code == 0, first.output
    assert first.stdout.strip()
    assert run("generate", *FAKE, "--prompt", "Once", "--max-tokens", "12").stdout == first.stdout
    assert run("generate", *FAKE, "--chat", "--prompt", "Once", "--max-tokens", "12").stdout != first.stdout


def _jobs(path: Path, count: int) -> None:
    lines = [json.dumps({"prompt": f"Line {i}", "max_new_tokens": 3 + i % 4}) for i in range(count)]
    lines[2] = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    lines[3] = json.dumps({"prompt": [99999]})
    path.write_text("\n".join(lines) + "\n")


def test_generate_file_answers_in_order_and_resumes(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _jobs(source, 12)
    result = run("generate", *FAKE, "--file", str(source), "--output", str(target), "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    whole = target.read_text()
    answers = [json.loads(line) for line in whole.splitlines()]
    assert len(answers) == 12
    assert [a["completion_tokens"] for a in answers[4:8]] == [3, 4, 5, 6]
    assert "99999" in answers[3]["error"]
    assert answers[2]["completion_tokens"] == 5

    lines = whole.splitlines(keepends=True)
    target.write_text("".join(lines[:7]) + lines[7][:10])  # as a kill would leave it
    run("generate", *FAKE, "--file", str(source), "--output", str(target), "--max-tokens", "5")
    assert [json.loads(line)["text"] for line in target.read_text().splitlines() if "text" in line] == [
        answer["text"] for answer in answers if "text" in answer
    ]
    done = run("generate", *FAKE, "--file", str(source), "--output", str(target))
    assert done.exit_code == 0
    assert "all 12 lines" in done.stderr


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 1"),
        ('{"text": "x"}', "prompt"),
        ('{"prompt": "x", "temprature": 1}', "temprature"),
        ("[1]", "object"),
    ],
)
def test_generate_file_names_the_bad_line(tmp_path: Path, line: str, word: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line + "\n")
    result = run("generate", *FAKE, "--file", str(source), "--output", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 1
    assert "line 1" in result.stderr
    assert word in result.stderr


def test_generate_wants_exactly_one_source() -> None:
    assert run("generate", *FAKE).exit_code == 2
    assert run("generate", *FAKE, "--prompt", "a", "--file", "b").exit_code == 2
    assert run("generate", *FAKE, "--file", "b").exit_code == 2


def test_chat_keeps_history_until_new() -> None:
    first = run("chat", *FAKE, "--max-tokens", "8", "--temperature", "0", stdin="hello\nhello\n/new\nhello\n")
    assert first.exit_code == 0, first.output
    answers = first.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2] != answers[1]


def test_chat_with_a_server_gives_what_the_local_model_gives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = run("chat", *FAKE, "--max-tokens", "8", "--temperature", "0", stdin="hello\nmore\n").stdout
    with Worker() as worker:
        lines = iter(["hello", "more"])

        def read(prompt: str = "") -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        run_chat(ServerTalker(worker.url, SamplingParams(temperature=0, max_new_tokens=8), None), None)
    assert capsys.readouterr().out == local


def test_chat_with_no_server_there() -> None:
    result = run("chat", "http://127.0.0.1:9", stdin="hello\n")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9" in result.stderr


def test_an_adapter_answers_offline(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "Once"}) + "\n")
    once = ("generate", *FAKE, "--prompt", "Once", "--max-tokens", "12")
    adapted = ("--lora", f"mine={tmp_path}/a.gguf", "--adapter", "mine")
    answer = run(*once, *adapted)
    assert answer.exit_code == 0, answer.output
    assert answer.stdout != run(*once).stdout
    run("generate", *FAKE, "--file", str(source), "--output", str(target), "--max-tokens", "12", *adapted)
    assert json.loads(target.read_text())["text"] == answer.stdout.removesuffix("\n")
    chat = ("chat", *FAKE, "--max-tokens", "8", "--temperature", "0")
    assert run(*chat, *adapted, stdin="hello\n").stdout != run(*chat, stdin="hello\n").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lora", "mine"), "--lora mine: must be NAME=FILE"),
        (("--lora", "=a.gguf"), "--lora =a.gguf: must be NAME=FILE"),
        (("--lora", "a=x", "--lora", "a=y"), "--lora a=y: the name 'a' is given twice"),
        (("--lora", "a=x"), "--adapter: no adapter is chosen (allowed: a)"),
        (("--lora", "a=x", "--adapter", "b"), "--adapter: there is no 'b' (allowed: a)"),
        (("--adapter", "b"), "--adapter: there is no 'b' (allowed: none, without --lora)"),
        (("--lora", "a=/nowhere/x.gguf", "--adapter", "a"), "model.lora 'a': there is no file /nowhere/x.gguf"),
    ],
)
def test_adapters_that_make_no_sense_are_refused_with_2(arguments: tuple[str, ...], words: str) -> None:
    result = run("generate", *FAKE, "--prompt", "Once", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_config_shows_values_and_sources() -> None:
    result = run("config", "--set", "http.port=9")
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("http.port"))
    assert row.split() == ["http.port", "9", "--set"]
    assert len(run("config", "--set", "http.port=9", "--changed").stdout.splitlines()) == 1


def test_config_refuses_unknown_keys_with_2() -> None:
    result = run("config", "--set", "http.prot=9")
    assert result.exit_code == 2
    assert "http.port" in result.stderr


def test_doctor_reports_the_machine_and_the_model(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the report says that it is missing")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "torch" in result.stdout
    assert "memory" in result.stdout
    missing = run("doctor", "--model", str(tmp_path / "nothing"))
    assert missing.exit_code == 1
    assert "nothing" in missing.stdout


def test_doctor_says_whether_a_model_fits() -> None:
    pytest.importorskip("torch", reason="loads the demo model")
    from weft.backends.registry import BUNDLED_MODEL

    result = run("doctor", "--model", str(BUNDLED_MODEL))
    assert result.exit_code == 0, result.output
    assert "it fits" in result.stdout
    assert "bytes a token" in result.stdout


def test_doctor_knows_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from weft.backends.registry import BUNDLED_MODEL

    result = run("doctor", "--model", str(BUNDLED_MODEL / "model-q8_0.gguf"))
    assert result.exit_code == 0, result.output
    assert "llama-cpp-python" in result.stdout and "it fits: qwen3" in result.stdout
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03")
    broken = run("doctor", "--model", str(tmp_path / "broken.gguf"))
    assert broken.exit_code == 1 and "broken.gguf" in broken.stdout
