"""Starts a real `weft serve` with all its processes, and looks at it from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

START_LIMIT_S = 120.0  # a limit against hanging, not an expectation
END_LIMIT_S = 60.0


class Process:
    """A running `weft` command that serves: `url`, `http` (a client), `process`. `ready`: the line that it prints."""

    ready: str

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "weft.cli", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.http = httpx.Client(timeout=END_LIMIT_S)
        self.url = ""

    def __enter__(self) -> Self:
        alarm = threading.Timer(START_LIMIT_S, self.process.kill)
        alarm.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        alarm.cancel()
        found = re.match(self.ready, line)
        assert found is not None, f"not ready: {line!r}\n{self.log}"
        self.url = found.group(1)
        self.http.base_url = self.url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return "".join(self._log)

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(END_LIMIT_S)
        self._reader.join(END_LIMIT_S)
        return code

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)


class Worker(Process):
    """A running server: also `pid`, and its children's pids by role."""

    ready = r"weft ready on (http://\S+) \(model \S+, backend \S+, KV \d+ tokens\)$"

    def __init__(self, *arguments: str, backend: str = "fake") -> None:
        super().__init__("serve", "--port", "0", "--backend", backend, *arguments)

    @property
    def pid(self) -> int:
        return self.process.pid

    def child(self, role: str) -> int:
        """Pid of the engine or text process."""
        for pid in children_of(self.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if b"weft.launch.child" in words and role.encode() in words:
                return pid
        raise AssertionError(f"no {role} process")

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def stats(self) -> dict[str, Any]:
        return self.http.get("/stats").raise_for_status().json()


def children_of(pid: int) -> list[int]:
    result = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            result += map(int, (task / "children").read_text().split())
    return result


def wait_gone(pid: int) -> None:
    """Waits, by the kernel's own event, for a process that is not our child to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        ready, _, _ = select.select([descriptor], [], [], END_LIMIT_S)
        assert ready, f"process {pid} is still there"
    finally:
        os.close(descriptor)
