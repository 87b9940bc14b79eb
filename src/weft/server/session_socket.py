"""WS /ws/streaming/{session_id}: the connections over which clients lead their conversations, and POST /streaming/stop.

Invariants: frames are read at every moment, also while an answer goes out; a connection has one turn at most, which
ends with the connection; whatever is wrong with a frame is an `error` frame, and the connection goes on. A turn's last
frame leaves when the next turn may come. While the server drains, a connection closes as soon as it has no turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from weft.core.errors import InvalidRequestError, NotFoundError, WeftError
from weft.server import schemas
from weft.server.bodies import INLINE_BYTES, parse_body, read_body
from weft.server.jobs import Server
from weft.server.speech import Desk
from weft.server.turns import GENERATING, PREFILLED, Turn
from weft.server.wire import to_json
from weft.web.edge import Gate
from weft.web.errors import internal_error, log
from weft.web.frames import GOING_AWAY, POLICY_VIOLATION, SESSION_ID, Frame, error_frame, wrong, wrong_id
from weft.web.gone import ClientGone

Step = Callable[[], Awaitable[Frame]]


class Sessions:
    """All connections of a worker; `app.state.sessions`."""

    def __init__(self, server: Server, desk: Desk, gate: Gate) -> None:
        """`gate` counts what is being done for them, so that a drain waits for it."""
        self._server = server
        self._desk = desk
        self._gate = gate
        self._open: dict[SessionSocket, None] = {}
        self._fewer = asyncio.Event()

    async def endpoint(self, ws: WebSocket) -> None:
        socket = SessionSocket(self._server, self._desk, self._gate, ws)
        self._open[socket] = None
        try:
            await socket.run()
        finally:
            del self._open[socket]
            self._fewer.set()

    def stop(self, session_id: str | None) -> int:
        """Stops the answer of one session, or of all; how many there were. Raises NotFoundError."""
        try:
            return self._server.conversations.stop(session_id)
        except NotFoundError:
            if not any(socket.session_id == session_id for socket in self._open):
                raise
            return 0

    async def drain(self) -> None:
        """Closes every connection as soon as it has no turn; returns when there is none left."""
        idle = [socket for socket in self._open if socket.turn is None]
        await asyncio.gather(*(socket.close(GOING_AWAY) for socket in idle))
        while self._open:
            self._fewer.clear()
            await self._fewer.wait()

    async def close_all(self) -> None:
        """Closes every connection, whatever it is doing."""
        await asyncio.gather(*(socket.close(GOING_AWAY) for socket in list(self._open)))


async def stop_streaming(request: Request) -> Response:
    """Stops the answers of all streaming sessions, or of one."""
    body = await read_body(request, schemas.StreamingStopRequest)
    sessions: Sessions = request.app.state.sessions
    return Response(to_json({"stopped": sessions.stop(body.session_id)}), media_type="application/json")


class SessionSocket:
    """One client's connection. See the module's docstring."""

    def __init__(self, server: Server, desk: Desk, gate: Gate, ws: WebSocket) -> None:
        self.session_id: str = ws.path_params["session_id"]
        self.turn: Turn | None = None
        self._server = server
        self._desk = desk
        self._gate = gate
        self._ws = ws
        self._sending = asyncio.Lock()
        self._steps: dict[asyncio.Task[None], Turn] = {}  # each begins when the one before it has ended
        self._closed = False

    async def run(self) -> None:
        """Serves until either side closes the connection."""
        await self._ws.accept(subprotocol="weft" if "weft" in self._ws.scope.get("subprotocols", ()) else None)
        try:
            if not SESSION_ID.fullmatch(self.session_id):
                await self._send(wrong_id())
                await self.close(POLICY_VIOLATION)
            elif self._server.draining:
                await self.close(GOING_AWAY)
            await self._read()
        except ClientGone:
            log.debug("session %s: the client is gone", self.session_id)
        finally:
            self._closed = True
            await self._end()

    async def close(self, code: int) -> None:
        """Closes the connection, after the frame that is being sent."""
        if self._closed:
            return
        self._closed = True
        async with self._sending:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await self._ws.close(code)

    # ---- frames that come -------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self._ws.receive())["type"] != "websocket.disconnect":
            if self._closed:
                continue
            try:
                await self._take(message)
            except WeftError as error:
                await self._send(error_frame(error))
            except ClientGone:
                raise
            except Exception as error:
                log.exception("session %s: a frame broke its handling", self.session_id)
                await self._send(error_frame(internal_error(error)))

    async def _take(self, message: Any) -> None:
        """Does what a frame says. Raises WeftError for what is wrong with it."""
        text = message.get("text")
        if text is None:
            raise wrong("invalid_json", "the frame is not JSON text but bytes")
        data = text.encode()
        frame = await self._parse(data)
        if isinstance(frame, schemas.StopFrame):
            if self.turn is not None:
                self.turn.stop()
        elif isinstance(frame, schemas.CloseFrame):
            await self._end()
            await self.close(1000)
        else:
            try:
                if isinstance(frame, schemas.PrefillFrame):
                    self._prefill(frame, len(data))
                elif isinstance(frame, schemas.GenerateFrame):
                    self._generate(frame)
            except WeftError as error:
                self._server.measures.refused(error)
                raise

    async def _parse(self, data: bytes) -> schemas.SessionFrame:
        if len(data) > INLINE_BYTES:
            return await self._server.readers.parse([data], schemas.SessionFrame)
        return parse_body(data, schemas.SessionFrame, self._server.facts.max_context_tokens)

    def _prefill(self, frame: schemas.PrefillFrame, size: int) -> None:
        turn = self.turn
        if turn is None:
            turn = self._new_turn(frame)
        elif turn.state == GENERATING:
            raise wrong("wrong_order", "prefill: this session's turn is still being answered")
        elif turn.complete:
            raise wrong("double_prefill", "prefill: the one before has not been followed by generate; it stands")
        try:
            count = turn.add(frame, size)
        except WeftError:
            if self.turn is None:
                turn.close()
            raise
        self.turn = turn
        last = turn.complete
        self._do(turn, lambda: turn.prefill(count, last))

    def _new_turn(self, frame: schemas.PrefillFrame) -> Turn:
        server = self._server
        server.check_kind(embeds=False)
        server.check_admitting()
        if not server.facts.has_chat_template:
            raise InvalidRequestError("messages: this model has no chat template", param="messages")
        return Turn(server, self._desk, self.session_id, frame, self._send, self._abandon)

    def _generate(self, frame: schemas.GenerateFrame) -> None:
        turn = self.turn
        if turn is None or turn.state != PREFILLED:
            raise wrong("wrong_order", "generate: it follows prefill_done, once")
        turn.generate(frame)
        self._do(turn, turn.answer)

    # ---- what is done for them --------------------------------------------------------------------------------

    def _do(self, turn: Turn, step: Step) -> None:
        before = next(reversed(self._steps), None)
        task = asyncio.create_task(self._run_step(before, turn, step))
        self._steps[task] = turn
        task.add_done_callback(self._steps.pop)

    async def _run_step(self, before: asyncio.Task[None] | None, turn: Turn, step: Step) -> None:
        if before is not None:
            await asyncio.wait((before,))
        with self._gate, contextlib.suppress(ClientGone):  # whoever reads sees it, too
            frame = await self._reply(turn, step)
            try:
                await self._send(frame)
            except BaseException:
                turn.undo()
                raise
            await self._close_if_draining()

    async def _reply(self, turn: Turn, step: Step) -> Frame:
        """What a step has to tell. When it has ended the turn, the next one may come."""
        if turn.over:
            return error_frame(wrong("wrong_order", "the turn was ended by the error before"))
        try:
            frame = await step()
        except WeftError as error:
            frame = error_frame(error)
            if turn.state == PREFILLED:  # it stands
                return frame
        except ClientGone:
            raise
        except Exception as error:
            log.exception("session %s: the turn broke", self.session_id)
            frame = error_frame(internal_error(error))
        else:
            if not turn.over:
                return frame
        turn.close()
        self.turn = None
        return frame

    def _abandon(self, turn: Turn, error: WeftError) -> None:
        """The turn is ended from elsewhere."""
        turn.close()
        if self.turn is turn:
            self.turn = None
        for task, of in self._steps.items():
            if of is turn:
                task.cancel()

        told = asyncio.create_task(self._tell_error(error))
        self._steps[told] = turn
        told.add_done_callback(self._steps.pop)

    async def _tell_error(self, error: WeftError) -> None:
        with self._gate, contextlib.suppress(ClientGone):
            await self._send(error_frame(error))
            await self._close_if_draining()

    async def _close_if_draining(self) -> None:
        if self._server.draining and self.turn is None:
            await self.close(GOING_AWAY)

    async def _end(self) -> None:
        """Ends the turn under way, if there is one, without a commit."""
        if self.turn is not None:
            self.turn.close()
            self.turn = None
        steps = list(self._steps)
        for task in steps:
            task.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    async def _send(self, frame: Frame) -> None:
        """Returns when the connection has taken it, which a slow client delays. Raises ClientGone."""
        text = msgspec.json.encode(frame).decode()
        async with self._sending:
            try:
                await self._ws.send_text(text)
            except (RuntimeError, WebSocketDisconnect):
                raise ClientGone from None
