"""One HTTP request to an ASGI app, message by message: what is sent can be watched, and the client can go away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

PATIENCE_S = 10.0  # never waited for unless a test fails


class Call:
    """A request in flight. `chunks` are the pieces of its body; `then_hang` leaves the body unfinished."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        chunks: list[bytes] | None = None,
        headers: dict[str, str] | None = None,
        then_hang: bool = False,
    ) -> None:
        self._chunks = [json.dumps(body).encode()] if chunks is None else list(chunks)
        self._then_hang = then_hang
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received_chunks = 0
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("weft", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._sent.put))

    async def _receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)  # as a real server, which lets others run
        if self._chunks:
            chunk = self._chunks.pop(0)
            self.received_chunks += 1
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks) or self._then_hang}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def disconnect(self) -> None:
        self._gone.set()

    @property
    def nothing_sent(self) -> bool:
        return self._sent.empty()

    async def next(self) -> dict[str, Any]:
        """The next message that the app sends."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._sent.get()

    async def next_data(self) -> bytes:
        """The next piece of the answer's body."""
        message = await self.next()
        assert message["type"] == "http.response.body", message
        return message["body"]

    async def done(self) -> None:
        """Waits until the app has finished with this request."""
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and whole body."""
        await self.done()
        start, *rest = [self._sent.get_nowait() for _ in range(self._sent.qsize())]
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(message["body"] for message in rest)
