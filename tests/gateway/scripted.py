"""A worker without an engine, on a real socket: its answers follow from the prompt alone, and its faults are scripted.

The k-th token of an answer is a word made from a hash of the whole conversation and k, so that an answer over a cache,
a cold one and a continued one must agree; `tell` marks words with the user's secret, so that wrong texts are seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

TOKENS = 6


def words(messages: list[dict[str, Any]], count: int = TOKENS) -> list[str]:
    """The tokens of the answer to a conversation."""
    text = json.dumps([[m["role"], m["content"]] for m in messages])
    return [hashlib.sha256(f"{text}{k}".encode()).hexdigest()[:5] + " " for k in range(count)]


def answer_to(messages: list[dict[str, Any]]) -> str:
    return "".join(words(messages))


class ScriptedWorker:
    """See the module's docstring.

    Attributes:
        steps: permits for tokens; None: no need of any. `hold()` makes tokens wait for `go(n)`.
        log: what it was asked, in order.
        sessions: id -> the conversation that it holds.
    """

    def __init__(self, *, slots: int = 4, session_slots: int = 4) -> None:
        self.slots, self.session_slots = slots, session_slots
        self.boot_id = "boot-1"
        self.ready, self.draining = True, False
        self.wait_s = 0.0
        self.prefixes: list[str] = []
        self.steps: asyncio.Semaphore | None = None
        self.health_gate: asyncio.Event | None = None
        self.log: list[dict[str, Any]] = []
        self.sessions: dict[str, dict[str, Any]] = {}
        self.epochs = 0
        self.refuse_with: int | None = None
        self.busy_answers = 0
        self.breaks_off_at_the_end = False
        self.port = 0
        self.waiting_for_step = asyncio.Event()
        self.gone = asyncio.Event()
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self, permits: int = 0) -> None:
        self.steps = asyncio.Semaphore(permits)

    def go(self, count: int = 1) -> None:
        assert self.steps is not None
        for _ in range(count):
            self.steps.release()

    async def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        app = Starlette(
            routes=[
                Route("/worker", self._worker),
                Route("/v1/models", self._models),
                Route("/v1/sessions/{session_id}", self._end_session, methods=["DELETE"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                WebSocketRoute("/ws/streaming/{session_id}", self._session),
            ]
        )
        config = uvicorn.Config(
            app, log_config=None, lifespan="off", ws="websockets-sansio", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0)

    async def die(self) -> None:
        """All connections are cut, and nobody listens any more."""
        assert self._server is not None and self._task is not None
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        await self._task
        self.sessions.clear()

    async def live_again(self) -> None:
        """As a new process on the same port."""
        self.boot_id += "+"
        await self.start()

    async def stop(self) -> None:
        if self._task is not None and not self._task.done():
            await self.die()

    # ---- HTTP -------------------------------------------------------------------------------------------------

    async def _worker(self, request: Request) -> Response:
        self.log.append({"type": "health"})
        if self.health_gate is not None:
            await self.health_gate.wait()
        return JSONResponse(
            {
                "boot_id": self.boot_id,
                "version": "0",
                "model": "scripted",
                "models": ["scripted"],
                "backend": "none",
                "ready": self.ready,
                "draining": self.draining,
                "requests": {"total": self.slots, "used": 0},
                "sessions": {"total": self.session_slots, "used": len(self.sessions)},
                "queued": 0,
                "wait_s": self.wait_s,
                "prefill_tokens_per_s": 1000.0,
                "tokens_per_char": 0.25,
                "prefixes": self.prefixes,
                "prefixes_version": 1,
            }
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}], "port": self.port})

    async def _end_session(self, request: Request) -> Response:
        ended = self.sessions.pop(request.path_params["session_id"], None)
        if ended is None:
            return JSONResponse({"error": {"message": "scripted", "type": "invalid_request_error"}}, 404)
        return JSONResponse({"id": "scripted", "ended": True, "aborted": 0})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.log.append({"type": "chat", "body": body, "headers": dict(request.headers)})
        if self.refuse_with is not None:
            kind = "service_unavailable" if self.refuse_with == 503 else "rate_limit_error"
            return JSONResponse({"error": {"message": "scripted", "type": kind}}, self.refuse_with)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        pieces = [word async for _, word in self._tokens(body["messages"], 0)]
        return JSONResponse({"choices": [{"message": {"content": "".join(pieces)}}]})

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        resume = body.get("weft_resume")
        begin = len(resume["token_ids"]) if resume else 0
        if resume:
            assert resume["token_ids"] == list(range(begin)), resume
        try:
            async for k, word in self._tokens(body["messages"], begin):
                delta = {"content": word} if k else {"role": "assistant", "content": word}
                data = json.dumps({"created": 5, "choices": [{"delta": delta}]}).encode()
                yield b": tokens %d\ndata: %b\n\n" % (k, data)
            yield b"data: [DONE]\n\n"
            if self.breaks_off_at_the_end:
                raise ConnectionError("scripted")
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def _tokens(self, messages: list[dict[str, Any]], begin: int) -> AsyncIterator[tuple[int, str]]:
        for k, word in enumerate(words(messages)):
            if k < begin:
                continue
            if self.steps is not None:
                self.waiting_for_step.set()
                await self.steps.acquire()
            yield k, word

    # ---- sessions ---------------------------------------------------------------------------------------------

    async def _session(self, ws: WebSocket) -> None:
        await ws.accept()
        turn = _Turn(self, ws, ws.path_params["session_id"])
        try:
            while True:
                await turn.take(await ws.receive_json())
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            self.log.append({"type": "gone", "session": turn.session_id})
            turn.end()


class _Turn:
    """A connection of a scripted worker; as careful as a real one only where tests need it."""

    def __init__(self, worker: ScriptedWorker, ws: WebSocket, session_id: str) -> None:
        self.worker, self.ws, self.session_id = worker, ws, session_id
        self.messages: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()

    async def take(self, frame: dict[str, Any]) -> None:
        self.worker.log.append({"session": self.session_id, **frame})
        if frame["type"] == "prefill":
            await self.prefill(frame)
        elif frame["type"] == "generate":
            self.task = asyncio.create_task(self.generate(frame))
        elif frame["type"] == "stop":
            self.stopping.set()

    async def prefill(self, frame: dict[str, Any]) -> None:
        if self.worker.busy_answers:
            self.worker.busy_answers -= 1
            await self.ws.send_json({"type": "error", "code": "session_busy", "message": "scripted"})
            return
        held = self.worker.sessions.get(self.session_id)
        if frame.get("epoch") is not None and (held is None or held["epoch"] != frame["epoch"]):
            await self.ws.send_json({"type": "error", "code": "epoch_mismatch", "message": "scripted"})
            return
        before = [] if frame["clear_kv_cache"] or held is None else held["messages"]
        self.messages = before + frame["messages"]
        await self.ws.send_json(
            {
                "type": "prefill_done",
                "cached_tokens": 10 * len(before),
                "input_tokens": 10 * len(frame["messages"]),
                "message_count": len(self.messages),
                "epoch": "unused",
            }
        )

    async def generate(self, frame: dict[str, Any]) -> None:
        resume = frame.get("resume")
        begin = len(resume["token_ids"]) if resume else 0
        text = resume["text"] if resume else ""
        if resume:
            assert text == "".join(words(self.messages)[:begin])
        index = 0
        async for k, word in self.tokens(begin):
            text += word
            await self.ws.send_json(self.chunk(index, word, [k]))
            index += 1
        stopped = self.stopping.is_set()
        await self.ws.send_json(self.chunk(index, None, []) | {"is_final": True})
        if self.worker.breaks_off_at_the_end:
            self.worker.breaks_off_at_the_end = False
            await self.ws.close(1011)
            return
        self.worker.epochs += 1
        epoch = f"{self.worker.boot_id}-{self.worker.epochs}"
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.worker.sessions[self.session_id] = {"messages": self.messages, "epoch": epoch}
        stats = {"cached": 0, "input": 0, "generated": index + begin, "total": 10 * len(self.messages)}
        done = {"token_stats": stats, "stopped": stopped, "elapsed_ms": 1.0, "message_count": len(self.messages)}
        await self.ws.send_json(
            {"type": "done", "finish_reason": "abort" if stopped else "stop", "epoch": epoch} | done
        )

    async def tokens(self, begin: int) -> AsyncIterator[tuple[int, str]]:
        for k, word in enumerate(words(self.messages)):
            if k < begin:
                continue
            if self.worker.steps is not None:
                self.worker.waiting_for_step.set()
                step = asyncio.ensure_future(self.worker.steps.acquire())
                stop = asyncio.ensure_future(self.stopping.wait())
                await asyncio.wait((step, stop), return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                if not step.done():
                    step.cancel()
                    return
            if self.stopping.is_set():
                return
            yield k, word

    def chunk(self, index: int, text: str | None, ids: list[int]) -> dict[str, Any]:
        frame = {"type": "chunk", "chunk_index": index, "text_delta": text, "token_ids": ids, "is_final": False}
        return frame | {"audio_data": None, "audio_sample_rate": None, "duration_ms": None}

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
