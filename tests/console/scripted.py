"""A server that speaks the session protocol from a script: what a turn does, and when, is the test's word.

It is strict about what clients send, and counts a token a word. `Scripted.serve()` runs it in the loop of the caller.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.console.scenes import Scene
from weft.web import console

SAMPLE_RATE = 24_000
GENERATE = {"type", "max_new_tokens", "temperature", "seed", "generate_audio"}


@dataclass
class Turn:
    """What one turn does.

    `queue`: positions that are told; before each but the first, and before the turn begins, `go` is awaited. `answer`:
    text pieces; before piece `pause_at`, `go` is awaited. `audio`: so many chunks of 0.1 s, after the text. `error`: a
    frame instead of prefill_done, or with `error_at` so many pieces. `drop_at`: there the connection is cut.
    """

    answer: list[str] = field(default_factory=lambda: ["Yes", ", ", "indeed", "."])
    queue: list[int] = field(default_factory=list)
    pause_at: int | None = None
    audio: int = 0
    error: dict[str, Any] | None = None
    error_at: int | None = None
    drop_at: int | None = None


class Scripted:
    """The server.

    Attributes:
        turns: scripts of the turns to come; without one a turn is `Turn()`.
        frames: what clients have sent, over all connections. cancelled: tickets. polls: paths of GETs.
        connections: session ids, one for each WebSocket.
        scene: what the live view is told.
    """

    def __init__(self, *, gateway: bool = False, key: str | None = None) -> None:
        self.gateway = gateway
        self.key = key
        self.turns: deque[Turn] = deque()
        self.frames: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.connections: list[str] = []
        self.polls: list[str] = []
        self.scene = Scene()
        self.url = ""
        self.kept: dict[str, list[dict[str, str]]] = {}
        self._go = asyncio.Semaphore(0)
        self._tickets: dict[str, asyncio.Event] = {}

    def go(self) -> None:
        """The turn that waits goes on."""
        self._go.release()

    def sent(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] == kind]

    async def next_go(self) -> None:
        await self._go.acquire()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Scripted]:
        config = uvicorn.Config(self.app(), port=0, log_level="warning", lifespan="off", ws="websockets-sansio")
        server = _Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            await task

    def app(self) -> ASGIApp:
        paths = ["/v1/models", "/stats", "/v1/requests", "/v1/sessions", "/v1/cache"]
        routes: list[Any] = [*console.routes(), WebSocketRoute("/ws/streaming/{session_id}", self._socket)]
        routes += [Route(path, self._get) for path in paths]
        if self.gateway:
            routes += [Route(path, self._get) for path in ("/workers", "/api/queue", "/api/routes")]
            routes += [Route("/workers/{name}" + path, self._get) for path in paths]
            routes.append(Route("/api/queue/{ticket}", self._cancel, methods=["DELETE"]))
        return _Keys(Starlette(routes=routes), self.key)

    # ---- HTTP -------------------------------------------------------------------------------------------------

    async def _get(self, request: Request) -> Response:
        self.polls.append(request.url.path)
        if request.url.path in self.scene.missing:
            return JSONResponse({"error": {"message": "no answer from the engine", "code": "engine_busy"}}, 503)
        return JSONResponse(self.scene.answer(request.url.path))

    async def _cancel(self, request: Request) -> Response:
        ticket = request.path_params["ticket"]
        if ticket not in self._tickets:
            return JSONResponse({"error": {"message": f"no ticket {ticket}", "code": "not_found"}}, 404)
        self.cancelled.append(ticket)
        self._tickets[ticket].set()
        return JSONResponse({"cancelled": True})

    # ---- sessions ---------------------------------------------------------------------------------------------

    async def _socket(self, socket: WebSocket) -> None:
        offered = socket.scope["subprotocols"]
        await socket.accept("weft" if "weft" in offered else None)
        self.connections.append(socket.path_params["session_id"])
        with contextlib.suppress(WebSocketDisconnect):
            await _Connection(self, socket).run()

    def ticket(self, name: str) -> asyncio.Event:
        return self._tickets.setdefault(name, asyncio.Event())

    def served(self, name: str) -> None:
        self._tickets.pop(name, None)


class _Connection:
    def __init__(self, server: Scripted, socket: WebSocket) -> None:
        self.server = server
        self.socket = socket
        self.session_id: str = socket.path_params["session_id"]
        self.inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            while (frame := await self.inbox.get()) is not None:
                assert frame["type"] == "prefill", frame
                turn = asyncio.create_task(self._turn(frame))
                done, _ = await asyncio.wait({turn, reader}, return_when=asyncio.FIRST_COMPLETED)
                if turn not in done:
                    turn.cancel()
                    await asyncio.wait({turn})
                    return
                turn.result()
        finally:
            reader.cancel()

    async def _read(self) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                frame = await self.socket.receive_json()
                self.server.frames.append(frame)
                if frame["type"] == "stop":
                    self.stopped.set()
                else:
                    await self.inbox.put(frame)
        await self.inbox.put(None)

    async def _turn(self, prefill: dict[str, Any]) -> None:
        server = self.server
        script = server.turns.popleft() if server.turns else Turn()
        self.stopped.clear()
        fault = _fault(prefill, server.gateway)
        if fault is not None:
            await self._error({"code": "unknown_parameter", "message": fault})
            return
        if server.gateway and not await self._wait_in_line(script):
            return
        if script.error is not None and script.error_at is None:
            await self._error(script.error)
            return
        messages = prefill["messages"]
        before = server.kept.get(self.session_id, [])
        cached = _tokens(before) if messages[: len(before)] == before else 0
        counts = {"cached": cached, "input": _tokens(messages) - cached}
        await self._send(
            "prefill_done", cached_tokens=cached, input_tokens=counts["input"], message_count=len(messages), epoch="e"
        )
        generate = await self.inbox.get()
        if generate is None:
            return
        assert generate["type"] == "generate" and not generate.keys() - GENERATE, generate
        said = await self._answer(script, bool(generate.get("generate_audio")))
        if said is not None:
            server.kept[self.session_id] = [*messages, {"role": "assistant", "content": said}]
            stats = counts | {"generated": len(said.split()), "total": sum(counts.values()) + len(said.split())}
            stopped = self.stopped.is_set()
            reason = "abort" if stopped else "stop"
            await self._send(
                "done",
                token_stats=stats,
                stopped=stopped,
                elapsed_ms=1234,
                finish_reason=reason,
                epoch="f",
                message_count=len(messages) + 1,
            )

    async def _wait_in_line(self, script: Turn) -> bool:
        """False if the ticket was cancelled."""
        server, name = self.server, f"t-{len(self.server.frames)}"
        waited = bool(script.queue)
        if waited:
            cancelled = server.ticket(name)
            for i, position in enumerate(script.queue):
                kind = "queue_update" if i else "queued"
                await self._send(
                    kind,
                    position=position,
                    queue_length=max(script.queue),
                    estimated_wait_s=2.5 * position,
                    ticket_id=name,
                )
                if await _first(server.next_go(), cancelled.wait()) == 1:
                    server.served(name)
                    await self._error({"code": "cancelled", "message": "the ticket was cancelled"})
                    return False
            server.served(name)
        known = self.session_id in server.kept
        route = {"worker": "loom-1", "reason": "longest cached history" if known else "no cached history"}
        await self._send("queue_done", waited_s=4.2 if waited else 0.0, route=route)
        return True

    async def _answer(self, script: Turn, audio: bool) -> str | None:
        """What was said; None after an error."""
        said = ""
        index = 0
        for i, piece in enumerate(script.answer):
            if i == script.drop_at:
                await self.socket.close(1012)
                return None
            if i == script.error_at:
                await self._error(script.error or {})
                return None
            if i == script.pause_at and await _first(self.server.next_go(), self.stopped.wait()) == 1:
                break
            said += piece
            await self._chunk(index, text_delta=piece)
            index += 1
        for _ in range(script.audio if audio else 0):
            samples = np.sin(np.arange(2400, dtype="<f4") / 8).astype("<f4") * 0.1
            data = base64.b64encode(samples.tobytes()).decode()
            await self._chunk(index, audio_data=data, audio_sample_rate=SAMPLE_RATE, duration_ms=100.0)
            index += 1
        await self._chunk(index, is_final=True)
        return said

    async def _chunk(self, index: int, **fields: Any) -> None:
        empty = dict.fromkeys(("text_delta", "audio_data", "audio_sample_rate", "duration_ms"))
        await self._send("chunk", **{"chunk_index": index, "is_final": False} | empty | fields)

    async def _error(self, fields: dict[str, Any]) -> None:
        await self._send("error", **fields)

    async def _send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind} | fields)


class _Keys:
    """Asks for the key as a worker does: a header, or a subprotocol."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app = app
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key is None or scope["path"] in console.PATHS or self._knows(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            error = {"message": "a valid API key is needed", "type": "invalid_request_error", "code": "invalid_api_key"}
            await JSONResponse({"error": error}, 401)(scope, receive, send)
        else:
            await WebSocket(scope, receive, send).close()

    def _knows(self, scope: Scope) -> bool:
        if scope["type"] == "http":
            return dict(scope["headers"]).get(b"authorization") == f"Bearer {self.key}".encode()
        return scope["subprotocols"] == ["weft", f"weft-api-key.{self.key}"]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay the test runner's."""
        yield


def _fault(prefill: dict[str, Any], gateway: bool) -> str | None:
    """What is wrong with a prefill of the console, which sends whole conversations."""
    if gateway != ("clear_kv_cache" not in prefill) or prefill.get("clear_kv_cache", True) is not True:
        return f"clear_kv_cache: {prefill.get('clear_kv_cache')}"
    roles = [message["role"] for message in prefill["messages"]]
    talk = roles[1:] if roles[0] == "system" else roles
    if talk != ["user", "assistant"] * (len(talk) // 2) + ["user"]:
        return f"messages: roles {roles}"
    return None


def _tokens(messages: list[dict[str, str]]) -> int:
    return sum(1 + len(message["content"].split()) for message in messages)


async def _first(*waits: Any) -> int:
    """Which of these coroutines was done first; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(i for i in reversed(range(len(tasks))) if tasks[i].done())
    finally:
        for task in tasks:
            task.cancel()
