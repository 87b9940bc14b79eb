"""`Generation`: the answers to what was submitted together, as they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from weft.core.errors import CancelledError
from weft.engine.deltas import first_part, merge
from weft.ipc.errors import error_info
from weft.ipc.messages import End, TextDelta, TextRequest

OnEnd = Callable[[int, End | None], None]
"""Is told once of each id when it has ended, or was closed before that (None)."""


class Client(Protocol):
    """What a Generation needs of `EngineClient`."""

    def send(self, request: TextRequest) -> None: ...

    def abort(self, request_ids: list[int] | None) -> None: ...

    def forget(self, request_id: int) -> None: ...


class Generation:
    """The deltas of what was submitted together: `take` until every id has ended; `close` aborts what has not.

    `sent` are on their way; each of `waiting`, of one id, is sent when one that was sent has ended.
    """

    def __init__(
        self,
        client: Client,
        sent: Sequence[TextRequest],
        waiting: Sequence[TextRequest] = (),
        on_end: OnEnd | None = None,
    ) -> None:
        self.request_ids = [request_id for request in (*sent, *waiting) for request_id in request.request_ids]
        self._client = client
        self._on_end = on_end
        self._open = dict.fromkeys(self.request_ids)
        self._waiting = {request.request_ids[0]: request for request in waiting}
        self._deltas: list[TextDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._left_over = False

    def deliver(self, delta: TextDelta) -> None:
        """A delta has arrived; ignored for an id that is not open (any more)."""
        if delta.request_id not in self._open:
            return
        self._deltas.append(delta)
        if delta.end is not None:
            was_sent = self._waiting.pop(delta.request_id, None) is None
            self._forget(delta.request_id, delta.end)
            if was_sent and self._waiting:
                self._client.send(self._waiting.pop(next(iter(self._waiting))))
        self._wake()

    async def take(self) -> list[TextDelta]:
        """What there is, merged per id, after waiting for a first delta; empty once every id has ended.

        A cancelled wait loses nothing. Of very many log probabilities it takes a part, after others had their turn.
        """
        if self._left_over:
            await asyncio.sleep(0)
        while not self._deltas:
            if not self._open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = first_part(self._deltas)
        self._left_over = bool(self._deltas)
        return merge(deltas)

    def drop(self, request_ids: Collection[int]) -> None:
        """Ends those of these ids as cancelled that have not been sent; nobody else knows of them."""
        error = error_info(CancelledError("the request was cancelled"))
        for request_id in request_ids:
            if request_id in self._waiting:
                self.deliver(TextDelta(request_id, end=End("cancelled", error=error)))

    def close(self) -> None:
        """Idempotent; to be called in a `finally` by whoever submitted."""
        if self._open:
            self._client.abort([request_id for request_id in self._open if request_id not in self._waiting])
            self._waiting.clear()
            for request_id in list(self._open):
                self._forget(request_id, None)
            self._wake()

    def _forget(self, request_id: int, end: End | None) -> None:
        del self._open[request_id]
        self._client.forget(request_id)
        if self._on_end is not None:
            self._on_end(request_id, end)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
