"""ZeroMQ push/pull between the processes of one worker, over Unix sockets in a private folder.

Every process binds one PULL socket, its inbox, and connects PUSH sockets to the inboxes of others. One sender's
messages to one inbox keep their order. High-water marks are off: what bounds memory is admission, and a dropped or
blocking send would lose a request's only ending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import zmq

from weft.ipc.messages import encode

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of all inboxes of one worker; `folder` is private to the user and removed by the supervisor."""

    folder: Path
    num_text: int = 1

    @property
    def api(self) -> str:
        return f"ipc://{self.folder / 'api'}"

    @property
    def engine(self) -> str:
        return f"ipc://{self.folder / 'engine'}"

    @property
    def engine_thread(self) -> str:
        """The engine's inbox as seen from another thread of its process."""
        return "inproc://engine"

    def text(self, index: int) -> str:
        return f"ipc://{self.folder / f'text{index}'}"


class Outbox:
    """Sends messages to one inbox. Used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)  # ms at close: the last message of a dying process still leaves
        self._socket.connect(address)

    def send(self, message: object) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()


class Inbox(Generic[M]):
    """Receives messages of one kind. Used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, decode: Callable[[bytes], M]) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decode = decode

    def bind(self, address: str) -> None:
        """Listens at one more address."""
        self._socket.bind(address)

    def receive(self, timeout_s: float | None) -> Iterator[M]:
        """All messages there are; waits for a first one up to `timeout_s` (0: not at all, None: for ever)."""
        timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000))
        if not self._socket.poll(timeout_ms):
            return
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decode(data)

    def close(self) -> None:
        self._socket.close()
