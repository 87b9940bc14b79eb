"""`weft gateway` with real processes on the fake engine: spawned workers, deaths, drains, and streams that survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.gateway import GatewayUnderTest
from tests.launch.worker import END_LIMIT_S, children_of, wait_gone

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SLOW = ("--set", "backend.fake.tokens_per_s=100", "--set", "gateway.health_interval_s=0.5")


def chat(text: str, tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    return body | {"temperature": 0} | fields


def until(fact: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + END_LIMIT_S
    while not (found := fact()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def family(pid: int) -> list[int]:
    """A process's children, and theirs."""
    children = children_of(pid)
    return children + [grandchild for child in children for grandchild in family(child)]


def worker_at(gateway: GatewayUnderTest, url: str) -> int:
    """Pid of the spawned worker that listens there."""
    port = int(url.rpartition(":")[2])
    for pid in gateway.worker_pids():
        inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists()}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port and f"socket:[{words[9]}]" in inodes:
                return pid
    raise AssertionError(f"nobody listens at {url}")


def test_spawned_workers_live_and_die_with_it() -> None:
    with GatewayUnderTest("--spawn", "2", "--backend", "fake") as gateway:
        states = [worker["state"] for worker in gateway.workers()]
        assert states == ["idle", "idle"]
        answers = [gateway.http.post(CHAT, json=chat(str(i), 4)) for i in range(4)]
        assert all(answer.status_code == 200 for answer in answers)
        assert {answer.headers["X-Weft-Route"][:2] for answer in answers} == {"w1", "w2"}
        told = gateway.http.post(CHAT, json=chat("0", 4, weft=True))
        assert told.json()["weft"]["route"].endswith(":prefix") and "; reason=prefix;" in told.headers["X-Weft-Route"]
        assert gateway.http.get("/v1/models").json()["data"][0]["id"] == "weft-demo"
        tokens = gateway.http.post("/tokenize", json={"prompt": "hello"}).json()
        assert tokens["count"] == len(tokens["tokens"])
        stats = gateway.http.get("/stats").json()
        assert stats["requests"]["finished"]["completed"] == 5 and stats["gateway"]["workers"]["idle"] == 2
        pids = family(gateway.process.pid)
        assert len(pids) == 6  # two workers with an engine and a text process each
        gateway.process.terminate()
        assert gateway.wait() == 0
        for pid in pids:
            wait_gone(pid)


def test_killed_it_takes_its_workers_along() -> None:
    with GatewayUnderTest("--spawn", "2", "--backend", "fake") as gateway:
        pids = family(gateway.process.pid)
        gateway.process.kill()
        gateway.wait()
        for pid in pids:
            wait_gone(pid)


def test_a_killed_worker_is_started_again() -> None:
    with GatewayUnderTest("--spawn", "2", "--backend", "fake", *SLOW) as gateway:
        victim = gateway.workers()[0]
        os.kill(worker_at(gateway, victim["url"]), signal.SIGKILL)
        for i in range(3):  # nobody notices
            assert gateway.http.post(CHAT, json=chat(str(i), 2)).status_code == 200
        until(lambda: gateway.workers()[0]["state"] == "idle" and gateway.workers()[0]["last_error"] is not None)
        worker_at(gateway, victim["url"])
        used = {gateway.http.post(CHAT, json=chat(f"again {i}", 2)).headers["X-Weft-Route"][:2] for i in range(4)}
        assert "w1" in used


@pytest.mark.parametrize("victim", ["worker", "engine"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_outlives_its_worker(victim: str, temperature: float) -> None:
    """Killed in the middle of an answer: the client gets the same text as from a worker that lives."""
    with GatewayUnderTest("--spawn", "2", "--backend", "fake", *SLOW) as gateway:
        body = chat("tell me", 40, temperature=temperature, seed=7, stream_options={"include_usage": True})
        whole = gateway.http.post(CHAT, json={**body, "stream": False, "stream_options": None}).json()
        gateway.http.post("/flush_cache")
        lines: list[str] = []
        with gateway.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            route = answer.headers["X-Weft-Route"][:2]
            url = next(worker["url"] for worker in gateway.workers() if worker["name"] == route)
            pid = worker_at(gateway, url)
            if victim == "engine":
                pid = next(p for p in children_of(pid) if b"engine" in Path(f"/proc/{p}/cmdline").read_bytes())
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    lines.append(line)
                if len(lines) == 10 and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
        events = [json.loads(line[6:]) for line in lines]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == whole["choices"][0]["message"]["content"]
        assert sum("role" in delta for delta in deltas) == 1
        assert len({event["id"] for event in events}) == 1 and len({event["created"] for event in events}) == 1
        assert events[-1]["usage"]["completion_tokens"] == 40
        stats = until(lambda: gateway.http.get("/stats").json())["gateway"]
        assert stats["continued"] == 1 and stats["in_flight"] == 0


def test_many_streams_while_workers_die() -> None:
    """Every client gets its whole text, though one worker after another is killed under them."""
    with GatewayUnderTest("--spawn", "2", "--backend", "fake", "--set", "gateway.retries=5", *SLOW) as gateway:
        expected = {
            i: gateway.http.post(CHAT, json=chat(f"client {i}", 24)).json()["choices"][0]["message"]["content"]
            for i in range(12)
        }
        texts: dict[int, str] = {}

        def read(i: int) -> None:
            import httpx

            with httpx.stream(
                "POST", gateway.url + CHAT, json=chat(f"client {i}", 24, stream=True), timeout=END_LIMIT_S
            ) as answer:
                text = ""
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        text += event["choices"][0]["delta"].get("content") or "" if "choices" in event else str(event)
                texts[i] = text

        threads = [threading.Thread(target=read, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for number in (0, 1):
            until(lambda: all(worker["state"] in ("idle", "busy") for worker in gateway.workers()))
            os.kill(worker_at(gateway, gateway.workers()[number]["url"]), signal.SIGKILL)
            until(lambda n=number: gateway.workers()[n]["state"] not in ("idle", "busy"))
        for thread in threads:
            thread.join(END_LIMIT_S)
        assert texts == expected
        assert gateway.http.get("/stats").json()["gateway"]["in_flight"] == 0


def test_draining_lets_streams_end() -> None:
    with GatewayUnderTest("--spawn", "1", "--backend", "fake", *SLOW) as gateway:
        with gateway.http.stream("POST", CHAT, json=chat("a", 30, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            gateway.process.terminate()
            refused = until(lambda: (a := gateway.http.post(CHAT, json=chat("b", 1))).status_code == 503 and a)
            assert refused.json()["error"]["code"] == "draining"
            assert "data: [DONE]" in list(lines)
        assert gateway.wait() == 0


def test_a_model_that_is_not_there() -> None:
    command = [sys.executable, "-m", "weft.cli", "gateway", "/nowhere", "--spawn", "2", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=END_LIMIT_S)
    assert ended.returncode == 2 and "/nowhere" in ended.stderr and not ended.stdout


def test_nothing_to_stand_before() -> None:
    command = [sys.executable, "-m", "weft.cli", "gateway"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=END_LIMIT_S)
    assert ended.returncode == 2 and "--worker" in ended.stderr
