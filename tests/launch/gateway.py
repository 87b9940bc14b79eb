"""Starts a real `weft gateway`, with workers of its own or before given ones."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import httpx

from tests.launch.worker import END_LIMIT_S, START_LIMIT_S, children_of


class GatewayUnderTest:
    """A running gateway: `url`, `http` (a client), `process`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "weft.cli", "gateway", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.http = httpx.Client(timeout=END_LIMIT_S)
        self.url = ""

    def __enter__(self) -> GatewayUnderTest:
        alarm = threading.Timer(START_LIMIT_S, self.process.kill)
        alarm.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        alarm.cancel()
        found = re.match(r"weft gateway ready on (http://\S+) \(model \S+, \d+ workers?\)$", line)
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

    def worker_pids(self) -> list[int]:
        """Of the workers that it started, in their order."""
        return sorted(children_of(self.process.pid))

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(END_LIMIT_S)
        self._reader.join(END_LIMIT_S)
        return code

    def workers(self) -> list[dict[str, Any]]:
        return self.http.get("/workers").raise_for_status().json()["workers"]  # type: ignore[no-any-return]

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)
