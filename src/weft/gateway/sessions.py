"""WS /ws/streaming/{session_id} of the gateway: the client's end. A `Turn` carries each turn to a worker.

Invariants: frames are read at every moment, also while a turn waits or is answered; a connection has one turn at most,
and a turn ends with its connection; whatever is wrong with a frame is an `error` frame, and the connection goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from weft.core.errors import BodyTooLargeError, InvalidRequestError, NotFoundError, WeftError
from weft.gateway.history import Messages
from weft.gateway.proxy import Proxy
from weft.gateway.turn import Turn, TurnError
from weft.gateway.workers import Place, Worker
from weft.web.edge import Gate
from weft.web.errors import internal_error, log
from weft.web.frames import GOING_AWAY, POLICY_VIOLATION, SESSION_ID, Frame, error_frame, wrong, wrong_id

MAX_KEPT = 65536  # sessions whose place is remembered
MAX_HASHED_CHARS = 4 << 20
"""A longer conversation never hits: hashing it would hold up everybody else."""
_PREFILL_FIELDS = frozenset({"messages", "clear_kv_cache", "is_last_chunk", "tts_ref_audio_base64"})


class Sessions:
    """All session connections of a gateway; `app.state.sessions`."""

    def __init__(self, proxy: Proxy, gate: Gate) -> None:
        """`gate` counts the turns, so that a drain waits for them."""
        self._proxy = proxy
        self._gate = gate
        self._open: dict[SessionSocket, None] = {}
        self._kept: OrderedDict[str, tuple[Worker, Place, str | None]] = OrderedDict()

    @property
    def turns(self) -> int:
        """How many are under way."""
        return sum(socket.turn is not None for socket in self._open)

    async def endpoint(self, ws: WebSocket) -> None:
        socket = SessionSocket(self._proxy, self._gate, ws, self.keep)
        self._open[socket] = None
        try:
            await socket.run()
        finally:
            del self._open[socket]

    async def stop(self, session_id: str | None) -> int:
        """Stops the turn of one session, or of all; how many there were. Raises NotFoundError."""
        found = [s for s in self._open if session_id is None or s.session_id == session_id]
        if session_id is not None and not found:
            raise NotFoundError(f"session_id: no session {session_id[:80]!r} is connected here", param="session_id")
        stopped = [await socket.turn.stop() for socket in found if socket.turn is not None]
        return sum(stopped)

    def keep(self, session_id: str, kept: tuple[Worker, Place]) -> None:
        """Where a client's session has its conversation now."""
        worker, place = kept
        self._kept[session_id] = worker, place, place.epoch
        self._kept.move_to_end(session_id)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def forget(self, session_id: str) -> tuple[Worker, Place] | None:
        """Where a session that is to end has its conversation; None: nowhere. The place is in use from now on."""
        worker, place, epoch = self._kept.pop(session_id, (None, None, None))
        if worker is None or place is None or place.used or epoch is None or place.epoch != epoch:
            return None  # by now it holds somebody else's
        place.clear()
        place.used = True
        return worker, place

    async def close_idle(self) -> None:
        """Closes the connections that have no turn under way."""
        for socket in list(self._open):
            if socket.turn is None:
                await socket.close(GOING_AWAY)


class SessionSocket:
    """One client's connection. See the module's docstring."""

    def __init__(
        self, proxy: Proxy, gate: Gate, ws: WebSocket, keep: Callable[[str, tuple[Worker, Place]], None]
    ) -> None:
        self.session_id: str = ws.path_params["session_id"]
        self.turn: Turn | None = None
        self._proxy = proxy
        self._gate = gate
        self._ws = ws
        self._keep = keep
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._messages: Messages = []
        self._collected = 0
        self._closed = False

    async def run(self) -> None:
        protocols = self._ws.scope.get("subprotocols", [])
        await self._ws.accept(subprotocol="weft" if "weft" in protocols else None)
        if not SESSION_ID.fullmatch(self.session_id):
            await self._send(wrong_id())
            await self.close(POLICY_VIOLATION)
            return
        try:
            while True:
                message = await self._ws.receive()
                if message["type"] == "websocket.disconnect":
                    return
                try:
                    if not await self._take(_frame_of(message), len(message["text"])):
                        await self.close(1000)
                        return
                except WeftError as error:
                    await self._send(error_frame(error))
        except (WebSocketDisconnect, RuntimeError) as error:  # a send after the client had gone
            log.debug("session %s: %r", self.session_id, error)
        finally:
            self._closed = True
            await self._end_turn()

    async def close(self, code: int) -> None:
        """Closes the connection; a turn under way ends without a word."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await self._ws.close(code)

    async def _take(self, frame: Frame, size: int) -> bool:
        """Does what a frame of so many characters says; False when it says that this is the end."""
        match frame["type"]:
            case "prefill":
                self._prefill(frame, size)
                if self.turn is None:  # more messages follow
                    count = len(self._messages)
                    none = {"cached_tokens": 0, "input_tokens": 0, "message_count": count, "epoch": None}
                    await self._send({"type": "prefill_done", **none})
            case "generate":
                if self.turn is None or not self.turn.prefilled or self.turn.generating:
                    raise wrong("wrong_order", "generate: it follows prefill_done, once")
                self.turn.generate(frame)
            case "stop":
                if self.turn is not None:
                    await self.turn.stop()
            case "close":
                return False
            case kind:
                text = f"type: {str(kind)[:80]!r} is not known (allowed: prefill, generate, stop, close)"
                raise wrong("unknown_type", text)
        return True

    def _prefill(self, frame: Frame, size: int) -> None:
        if self.turn is not None:
            if self.turn.generating:
                raise wrong("wrong_order", "prefill: this session's turn is still being answered")
            raise wrong("double_prefill", "prefill: the one before has not been followed by generate; it stands")
        self._proxy.check_open()
        for name in frame.keys() - _PREFILL_FIELDS - {"type"}:
            raise InvalidRequestError(f"{name}: not a field of prefill", param=name, code="unknown_parameter")
        messages, last = frame.get("messages"), frame.get("is_last_chunk", True)
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequestError("messages: a list of messages is needed", param="messages")
        for name in ("is_last_chunk", "clear_kv_cache"):
            if not isinstance(frame.get(name, False), bool):
                raise InvalidRequestError(
                    f"{name}: {frame[name]!r:.80} is not allowed (allowed: a boolean)", param=name
                )
        self._messages += messages
        self._collected += size
        if self._collected > self._proxy.max_body_bytes:
            self._messages, self._collected = [], 0
            limit = self._proxy.max_body_bytes
            raise BodyTooLargeError(f"messages: those of all prefills of this turn are over the limit of {limit} bytes")
        if not last:
            return
        if not self._messages:
            raise InvalidRequestError("messages: at least one message is needed", param="messages")
        hashed = self._collected <= MAX_HASHED_CHARS
        whole, self._messages, self._collected = self._messages, [], 0
        fields = {name: value for name, value in frame.items() if name not in ("messages", "is_last_chunk")}
        self.turn = Turn(self._proxy, self._send, fields, whole, hashed=hashed)
        self._task = asyncio.create_task(self._carry(self.turn))

    async def _carry(self, turn: Turn) -> None:
        """Carries a turn to its end. Its last frame leaves when the next turn may come."""
        with self._gate:
            await self._carried(turn)
        if self._proxy.draining:
            await self.close(GOING_AWAY)

    async def _carried(self, turn: Turn) -> None:
        frame: Frame | None = None
        try:
            frame = await turn.run()
            if turn.kept is not None:
                self._keep(self.session_id, turn.kept)
        except TurnError as error:
            frame = error.frame
        except WeftError as error:
            frame = error_frame(error)
        except WebSocketDisconnect:  # whoever reads will see it
            pass
        except Exception as error:
            if self._ws.application_state is not WebSocketState.CONNECTED:  # a send after the client had gone
                return
            log.exception("session %s: the turn broke", self.session_id)
            frame = error_frame(internal_error(error))
        finally:
            turn.close()
            self.turn = None
        if frame is not None:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await self._send(frame)

    async def _end_turn(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self, frame: Frame) -> None:
        async with self._sending:
            await self._ws.send_text(msgspec.json.encode(frame).decode())


def _frame_of(message: Any) -> Frame:
    text = message.get("text")
    if text is None:
        raise wrong("invalid_json", "a frame has to be JSON text, not bytes")
    try:
        frame = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise wrong("invalid_json", f"the frame is not valid JSON: {error}") from None
    if not isinstance(frame, dict):
        raise wrong("invalid_json", "a frame has to be a JSON object")
    if not isinstance(frame.get("type"), str):
        raise wrong("unknown_type", "type: it is needed, as text (allowed: prefill, generate, stop, close)")
    return frame
