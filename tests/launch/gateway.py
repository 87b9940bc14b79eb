"""Starts a real `weft gateway`, with workers of its own or before given ones."""

from __future__ import annotations

from typing import Any

from tests.launch.worker import Process, children_of


class GatewayUnderTest(Process):
    """A running gateway."""

    ready = r"weft gateway ready on (http://\S+) \(model \S+, \d+ workers?\)$"

    def __init__(self, *arguments: str) -> None:
        super().__init__("gateway", "--port", "0", *arguments)

    def worker_pids(self) -> list[int]:
        """Of the workers that it started, in their order."""
        return sorted(children_of(self.process.pid))

    def workers(self) -> list[dict[str, Any]]:
        return self.http.get("/workers").raise_for_status().json()["workers"]  # type: ignore[no-any-return]
