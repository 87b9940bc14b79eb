"""Processes that hang, engines that are started again, and more connections than are allowed; seen from outside."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.launch.test_processes import LONG, SLOW, events
from tests.launch.worker import END_LIMIT_S, Worker, wait_gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")

QUICK = ("--set", "engine.heartbeat_s=2")


def until(worker: Worker, path: str, status: int) -> httpx.Response:
    """Asks until the answer has this status."""
    end_s = time.monotonic() + END_LIMIT_S
    while time.monotonic() < end_s:
        response = worker.http.get(path)
        if response.status_code == status:
            return response
    raise AssertionError(f"{path} never answered {status}\n{worker.log}")


def complete(worker: Worker, **more: Any) -> httpx.Response:
    return worker.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3, **more})


@pytest.mark.parametrize("role", ["engine", "text"])
def test_a_stopped_process_is_found_out_and_ends_the_worker(role: str) -> None:
    with Worker(*SLOW, *QUICK) as worker:
        pid = worker.child(role)
        with worker.http.stream("POST", "/v1/completions", json=LONG) as response:
            stream = events(response)
            next(stream)
            os.kill(pid, signal.SIGSTOP)
            last = list(stream)[-1]
        assert last["error"]["code"] == "engine_dead"
        assert "hung" in last["error"]["message"] and role in last["error"]["message"]
        assert worker.wait() == 1
        wait_gone(pid)


def test_a_step_that_never_ends_is_found_out() -> None:
    with Worker("--set", 'backend.fake.faults={"hang_on_token": 300}', "--set", "engine.heartbeat_s=0.5") as worker:
        response = complete(worker, prompt=[300])
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        assert worker.wait() == 1


def test_being_stopped_itself_is_no_reason_to_kill_anybody() -> None:
    """A suspended laptop: everything stands still for longer than a heartbeat may be missed, then goes on."""
    with Worker(*QUICK) as worker:
        pids = [worker.pid, worker.child("engine"), worker.child("text")]
        for stopped in (pids, pids[:1]):
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(3)  # real time has to pass: this is what is tested
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
            assert complete(worker).status_code == 200
        assert worker.http.get("/health").status_code == 200
        assert [worker.child("engine"), worker.child("text")] == pids[1:]


@pytest.mark.parametrize(("role", "number"), [("engine", signal.SIGKILL), ("text", signal.SIGKILL)])
def test_restart_serves_again(role: str, number: signal.Signals) -> None:
    with Worker(*SLOW, *QUICK, "--restart") as worker:
        pids = [worker.child("engine"), worker.child("text")]
        with worker.http.stream("POST", "/v1/completions", json=LONG) as response:
            stream = events(response)
            next(stream)
            os.kill(worker.child(role), number)
            last = list(stream)[-1]
        assert last["error"]["code"] == "engine_dead"
        assert until(worker, "/health", 503).json()["error"]["code"] in ("loading", "unavailable")
        until(worker, "/health", 200)
        for pid in pids:
            wait_gone(pid)
        answer = complete(worker)
        assert answer.status_code == 200
        assert int(answer.headers["x-request-id"]) > 1  # numbers go on
        stats = worker.stats()
        assert stats["requests"]["processing"] == 0 and stats["kv"]["active"] == 0
        worker.terminate()
        assert worker.wait() == 0


def test_restart_after_a_hang() -> None:
    with Worker(*QUICK, "--restart") as worker:
        os.kill(worker.child("engine"), signal.SIGSTOP)
        until(worker, "/health", 503)
        until(worker, "/health", 200)
        assert complete(worker).status_code == 200


def test_restart_gives_up_on_an_engine_that_keeps_dying() -> None:
    with Worker("--set", 'backend.fake.faults={"exit_on_token": 300}', "--restart") as worker:
        for _ in range(3):
            until(worker, "/health", 200)
            assert complete(worker, prompt=[300]).status_code == 503
        assert worker.wait() == 1
        assert "given up" in worker.log


def connections(worker: Worker, count: int) -> Iterator[socket.socket]:
    host, port = worker.url.removeprefix("http://").split(":")
    for _ in range(count):
        yield socket.create_connection((host, int(port)), timeout=END_LIMIT_S)


def answers(connection: socket.socket) -> bool:
    """Whether a request on this connection is answered; False when it was closed."""
    try:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status == 200 and bool(answer.read())
    except (OSError, HTTPException):
        return False


def test_a_connection_too_many_is_closed_at_once_and_a_freed_one_can_be_used() -> None:
    with Worker("--set", "http.max_connections=3") as worker:
        worker.http.close()
        opened: list[socket.socket] = []
        end_s = time.monotonic() + END_LIMIT_S
        while len(opened) < 3:  # the server hears in its own time that the client that waited for its start has gone
            (connection,) = connections(worker, 1)
            opened += [connection] if answers(connection) else []
            assert time.monotonic() < end_s
        (extra,) = connections(worker, 1)
        assert not answers(extra)
        assert answers(opened[0])  # the others do not notice
        opened.pop().close()
        while not answers(next(connections(worker, 1))):
            assert time.monotonic() < end_s
        for connection in opened:
            connection.close()
        worker.terminate()
        assert worker.wait() == 0


def test_a_child_that_is_killed_while_it_starts_ends_the_start() -> None:
    worker = Worker("--set", "engine.heartbeat_s=2")
    try:
        end_s = time.monotonic() + END_LIMIT_S
        while True:
            try:
                os.kill(worker.child("engine"), signal.SIGKILL)
                break
            except (AssertionError, FileNotFoundError):
                assert time.monotonic() < end_s
        assert worker.wait() == 1
        assert "engine process was killed by signal 9" in worker.log
    finally:
        worker.process.kill()
        worker.http.close()
