"""One WebSocket connection to an ASGI app, message by message; the client can be slow, and go away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

PATIENCE_S = 10.0  # never waited for unless a test fails


class Socket:
    """A connection in flight. `open()` makes it wait for the answer to the upgrade.

    Attributes:
        taking: cleared, the client takes no more bytes; what the app sends waits.
        takes_no: a type of frame that it never takes.
        offered: how often the app has begun to send something.
    """

    def __init__(
        self,
        app: Any,
        session_id: str = "s",
        *,
        headers: dict[str, str] | None = None,
        subprotocols: tuple[str, ...] = (),
        extensions: dict[str, Any] | None = None,
    ) -> None:
        self.taking = asyncio.Event()
        self.taking.set()
        self.takes_no: str | None = None
        self.offered = 0
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gone = False
        path = f"/ws/streaming/{session_id}"
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "subprotocols": list(subprotocols),
            "client": ("127.0.0.1", 1),
            "server": ("weft", 80),
            "extensions": {"websocket.http.response": {}} if extensions is None else extensions,
        }
        self._to_app.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.ensure_future(app(scope, self._to_app.get, self._send))

    async def open(self) -> Socket:
        message = await self.next_message()
        assert message["type"] == "websocket.accept", message
        return self

    def send(self, kind: str, **fields: Any) -> None:
        self.send_text(json.dumps({"type": kind, **fields}))

    def send_text(self, text: str) -> None:
        self._to_app.put_nowait({"type": "websocket.receive", "text": text})

    def send_bytes(self, data: bytes) -> None:
        self._to_app.put_nowait({"type": "websocket.receive", "bytes": data})

    def disconnect(self) -> None:
        self._gone = True
        self.taking.set()
        self._to_app.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def next_message(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            return await self._from_app.get()

    async def next(self) -> dict[str, Any]:
        """The next frame."""
        message = await self.next_message()
        assert message["type"] == "websocket.send", message
        return json.loads(message["text"])

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The frames up to the next one of this kind."""
        frames = [await self.next()]
        while frames[-1]["type"] != kind:
            frames.append(await self.next())
        return frames

    async def prefill(self, *contents: str, **fields: Any) -> dict[str, Any]:
        """A prefill of user messages; the frame that answers it."""
        messages = [{"role": "user", "content": content} for content in contents]
        self.send("prefill", messages=messages, **fields)
        return await self.next()

    async def ask(self, content: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        """A whole turn: its text and its `done`."""
        done = await self.prefill(content, **fields)
        assert done["type"] == "prefill_done", done
        self.send("generate")
        *chunks, last = await self.until("done")
        assert [chunk["is_final"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert [chunk["chunk_index"] for chunk in chunks] == list(range(len(chunks)))
        return "".join(chunk["text_delta"] or "" for chunk in chunks), last

    @property
    def quiet(self) -> bool:
        """Nothing has come that was not looked at."""
        return self._from_app.empty()

    async def closed(self) -> int:
        """Waits until the app has closed the connection and is done with it; the code."""
        while (message := await self.next_message())["type"] != "websocket.close":
            pass
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return int(message["code"])

    async def done(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def _send(self, message: dict[str, Any]) -> None:
        self.offered += 1
        if self.takes_no is not None and json.loads(message.get("text") or "{}").get("type") == self.takes_no:
            self.taking.clear()
        await self.taking.wait()
        if self._gone:
            raise OSError("the client is gone")
        self._from_app.put_nowait(message)
        if message["type"] == "websocket.close":
            self._to_app.put_nowait({"type": "websocket.disconnect", "code": message.get("code", 1000)})
