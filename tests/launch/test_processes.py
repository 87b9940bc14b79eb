"""The life and death of a worker's processes, seen from outside: exit codes, signals, kills, drains."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.launch.worker import Worker, children_of, wait_gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the torch engine")

SLOW = ("--set", "backend.fake.tokens_per_s=50")
LONG = {"prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True, "temperature": 0}


def events(response: httpx.Response) -> Iterator[Any]:
    """The data of each server-sent event, parsed; "[DONE]" as it is."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("role", ["engine", "text"])
def test_killed_child_ends_streams_and_the_whole_worker(role: str) -> None:
    with Worker(*SLOW) as worker:
        pids = [worker.child("engine"), worker.child("text")]
        with worker.http.stream("POST", "/v1/completions", json=LONG) as response:
            stream = events(response)
            next(stream)
            os.kill(worker.child(role), signal.SIGKILL)
            last = list(stream)[-1]
        assert last["error"]["code"] == "engine_dead"
        assert role in last["error"]["message"]
        assert worker.wait() == 1
        for pid in pids:
            wait_gone(pid)


def test_killed_supervisor_takes_its_children_along() -> None:
    with Worker() as worker:
        pids = [worker.child("engine"), worker.child("text")]
        os.kill(worker.pid, signal.SIGKILL)
        for pid in pids:
            wait_gone(pid)


def test_sigterm_drains() -> None:
    with Worker("--set", "backend.fake.tokens_per_s=400") as worker:
        body = LONG | {"max_tokens": 400}
        with worker.http.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            next(stream)
            worker.terminate()
            refused = _until_refused(worker)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            rest = list(stream)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert worker.wait() == 0


def _until_refused(worker: Worker) -> httpx.Response:
    """The signal reaches the server a moment after it was sent: asks until it shows."""
    while True:
        response = httpx.post(f"{worker.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
        if response.status_code != 200:
            return response


def test_second_sigterm_ends_at_once_with_an_error_event() -> None:
    with Worker(*SLOW) as worker:
        with worker.http.stream("POST", "/v1/completions", json=LONG) as response:
            stream = events(response)
            next(stream)
            worker.terminate()
            _until_refused(worker)
            worker.terminate()
            last = list(stream)[-1]
        assert last["error"]["code"] == "draining"
        assert worker.wait() == 0


def test_drain_limit_ends_what_is_left() -> None:
    with Worker(*SLOW, "--set", "http.drain_s=0") as worker:
        with worker.http.stream("POST", "/v1/completions", json=LONG) as response:
            stream = events(response)
            next(stream)
            worker.terminate()
            assert list(stream)[-1]["error"]["code"] == "draining"
        assert worker.wait() == 0


def test_idle_worker_ends_cleanly_and_prints_one_line() -> None:
    with Worker() as worker:
        worker.terminate()
        assert worker.wait() == 0
        assert worker.process.stdout is not None
        assert worker.process.stdout.read() == ""


def test_failed_step_ends_its_request_and_three_in_a_row_end_the_worker() -> None:
    with Worker("--set", "backend.fake.faults={raise_on_token: 7}") as worker:
        good = {"prompt": [9, 9], "max_tokens": 2}
        for _ in range(2):
            failed = worker.http.post("/v1/completions", json={"prompt": [7, 7], "max_tokens": 2})
            assert failed.status_code == 500
            assert "token 7" in failed.json()["error"]["message"]
            assert worker.http.post("/v1/completions", json=good).status_code == 200
        assert worker.http.get("/health").status_code == 200
        for _ in range(3):
            worker.http.post("/v1/completions", json={"prompt": [7, 7], "max_tokens": 2})
        assert worker.wait() == 1
        assert "3 steps in a row failed" in worker.log


def test_bad_row_ends_one_request_only() -> None:
    with Worker("--set", "backend.fake.faults={nan_on_token: 7}") as worker:
        failed = worker.http.post("/v1/completions", json={"prompt": [7, 7], "max_tokens": 2})
        assert failed.status_code == 500
        assert worker.http.post("/v1/completions", json={"prompt": [9, 9], "max_tokens": 2}).status_code == 200
        assert worker.stats()["requests"]["finished"]["failed"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "http.prot=1"), ("http.prot", "http.port")),
        (("--set", "scheduler.max_batch_size=16", "--set", "http.max_concurrent_requests=8"), ("16", "8")),
        (("--backend", "magic"), ("magic", "fake")),
        pytest.param(("/no/such/folder",), ("/no/such/folder",), marks=NEEDS_TORCH),
        (("/no/such/folder", "--backend", "fake"), ("/no/such/folder",)),
        (("--backend", "fake", "--set", "backend.fake.faults={explode: 1}"), ("explode",)),
        (("--backend", "fake", "--set", "model.max_context_tokens=4096"), ("4096", "2048")),
        (("--backend", "fake", "--lora", "mine=/no/such.gguf"), ("model.lora 'mine'", "/no/such.gguf")),
        (("--backend", "fake", "--lora", f"weft-demo={__file__}"), ("model.lora 'weft-demo'", "model.served_name")),
        pytest.param(("--lora", f"mine={__file__}"), ("model.lora", "torch", "llama_cpp"), marks=NEEDS_TORCH),
    ],
)
def test_bad_settings_exit_with_2_and_say_why(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = serve(*arguments)
    assert result.returncode == 2, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_port_in_use_exits_with_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve("--backend", "fake", "--port", str(port))
    assert result.returncode == 2
    assert str(port) in result.stderr


@NEEDS_TORCH
def test_api_and_text_processes_load_no_torch() -> None:
    with Worker(backend="torch") as worker:
        for pid in (worker.pid, worker.child("text")):
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, weft.cli; print([m for m in ('torch', 'fastapi', 'numpy', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_several_text_processes_share_the_work() -> None:
    with Worker("--set", "text.num_tokenizers=3") as worker:
        assert len(children_of(worker.pid)) == 4
        answers = [
            worker.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 8, "temperature": 0}).json()
            for _ in range(6)
        ]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        many = worker.http.post("/v1/completions", json={"prompt": "a b", "n": 5, "max_tokens": 4, "seed": 1}).json()
        assert len(many["choices"]) == 5


def test_idle_costs_no_processor_time() -> None:
    """The engine sleeps on its inbox: in two seconds of idling it uses less than a tenth of one."""
    with Worker() as worker:
        worker.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        before = _cpu_s(worker.child("engine"))
        time.sleep(2.0)  # what is measured is processor time, which a busy machine does not change
        assert _cpu_s(worker.child("engine")) - before < 0.2


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
