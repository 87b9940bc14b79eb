"""One turn of a session on its way: from the line to a worker, through its prefill and its answer, to `done`.

Invariants: the place on the worker has no history while the turn runs, and gets one only from a clean `done`; only the
new messages go to a worker that has confirmed, by its epoch, that it holds what came before; an answer that has begun
goes on on another worker with the tokens so far; what the client is sent is counted and numbered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from weft.core.errors import CancelledError, UnavailableError, WeftError
from weft.gateway.history import Messages, history_hash, split_at_last_user
from weft.gateway.pool import Lease, Pool, Ticket
from weft.gateway.proxy import Proxy, WorkerFailed
from weft.gateway.routing import Wanted
from weft.gateway.workers import Place, Worker
from weft.web.errors import log
from weft.web.frames import Frame

Send = Callable[[Frame], Awaitable[None]]

UPDATE_S = 0.2
"""A waiting client is told of a new place in the line this often at most."""

_CONNECT_LIMIT_S = 5.0
_BUSY_TRIES, _BUSY_PAUSE_S = 40, 0.05
_WORKERS_FAULT = frozenset({"engine_dead", "unavailable", "loading", "draining", "no_worker", "internal"})
KIND = "streaming"


class TurnError(Exception):
    """The turn is over, with this error frame."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame["message"])
        self.frame = frame


class Turn:
    """One turn. `send` takes frames for the client; `run` ends when the turn is over.

    `kept`: where its conversation is held then, after a clean end.
    """

    def __init__(self, proxy: Proxy, send: Send, prefill: Frame, messages: Messages, *, hashed: bool = True) -> None:
        """`messages`: the whole conversation; `prefill`: the other fields go on as they are.

        `hashed`: whether it is short enough to be hashed between two others' frames.
        """
        self._proxy = proxy
        self._pool: Pool = proxy.pool
        self._send = send
        self._prefill = prefill
        self._messages = messages
        self._history, self._new = split_at_last_user(messages)
        anew = bool(prefill.get("clear_kv_cache"))
        self._hashed = hashed
        self._wanted = Wanted(KIND, turn=True, history=history_hash(self._history) if hashed and not anew else None)
        self._generate: Frame | None = None
        self._asked_ids = False
        self._may_generate = asyncio.Event()
        self._stopping = self._cancelled = False
        self._worker: ClientConnection | None = None
        self._ticket: Ticket | None = None
        self._lease: Lease | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._chunks = 0
        self._prefilled = False
        self._moves = 0
        self._final: Frame | None = None
        self.kept: tuple[Worker, Place] | None = None

    # ---- what the client does meanwhile -----------------------------------------------------------------------

    @property
    def generating(self) -> bool:
        return self._generate is not None

    @property
    def prefilled(self) -> bool:
        return self._prefilled

    def generate(self, frame: Frame) -> None:
        """The client's `generate`, after `prefill_done`."""
        self._asked_ids = frame.get("return_token_ids") is True
        self._generate = {**frame, "return_token_ids": True}
        if frame.get("seed") is None:
            self._generate["seed"] = secrets.randbits(53)  # so that another worker can go on with the same text
        self._may_generate.set()

    async def stop(self) -> bool:
        """The client has had enough; False if there was nothing to stop."""
        if self.generating:  # also while it moves to another worker, which is told then
            self._stopping = True
            if self._worker is not None:
                with contextlib.suppress(WebSocketException):
                    await self._worker.send('{"type":"stop"}')
            return True
        if self._ticket is None:
            return False
        self._cancelled = True  # the lease may be here already, and not taken yet
        with contextlib.suppress(WeftError):
            self._pool.cancel(self._ticket.id)
        return True

    def close(self) -> None:
        """Gives back what it holds; idempotent. A turn that is not done leaves nothing behind on the worker."""
        if self._ticket is not None:
            self._pool.leave(self._ticket)
        if self._lease is not None:
            self._lease.release(ok=False)
        if self._worker is not None:
            self._worker.transport.abort()

    # ---- the way ----------------------------------------------------------------------------------------------

    async def run(self) -> Frame:
        """Carries the turn to its end; returns `done`, still to be sent. Raises TurnError, or WeftError."""
        for attempt in range(self._proxy.retries + 1):
            lease = await self._get_lease(first=attempt > 0)
            try:
                return await self._on_worker(lease)
            except WorkerFailed as error:
                lease.release(ok=False)
                if not error.full:
                    self._pool.failed(lease, str(error), lost=error.lost)
                self._wanted.avoid.add(lease.worker.name)
                self._wanted.history = None
                reason = f"worker {lease.worker.name}: {error}"
            finally:
                lease.release(ok=False)
            if attempt < self._proxy.retries:
                self._pool.retries += 1
                log.info("a session's turn moves on: %s", reason)
        raise UnavailableError(reason, code="worker_failed")

    async def _get_lease(self, *, first: bool) -> Lease:
        ticket = self._pool.enter(self._wanted, first=first)
        self._ticket = ticket
        try:
            told = 0
            while not ticket.lease.done():
                ticket.changed.clear()
                if ticket.position != told and not first:
                    told = await self._tell_position("queue_update" if told else "queued", ticket)
                changed = asyncio.ensure_future(ticket.changed.wait())
                try:
                    await asyncio.wait((ticket.lease, changed), return_when=asyncio.FIRST_COMPLETED)
                    if not ticket.lease.done():  # several steps forward at once are one update
                        await asyncio.wait((ticket.lease,), timeout=UPDATE_S)
                finally:
                    changed.cancel()
            lease: Lease = ticket.lease.result()
        except BaseException:
            self._pool.leave(ticket)  # with the lease, if it has come meanwhile
            raise
        finally:
            self._ticket = None
        self._lease = lease
        if self._cancelled:
            raise CancelledError("the turn was stopped while it waited")
        if not first:
            route = {"worker": lease.worker.name, "reason": lease.reason}
            frame = {"type": "queue_done", "waited_s": round(lease.waited_s, 6), "route": route}
            with lease.to_client:
                await self._send(frame)
        return lease

    async def _tell_position(self, kind: str, ticket: Ticket) -> int:
        position = ticket.position
        wait_s, length = self._pool.estimate(position)
        await self._send(
            {
                "type": kind,
                "position": position,
                "queue_length": length,
                "estimated_wait_s": round(wait_s, 3),
                "ticket_id": ticket.id,
            }
        )
        return position

    async def _on_worker(self, lease: Lease) -> Frame:
        assert lease.place is not None
        if not lease.open:  # the client took so long to take its last frame
            raise TurnError(_expired())
        url = f"ws{lease.worker.url.removeprefix('http')}/ws/streaming/{lease.place.id}"
        headers = [(name.decode(), value.decode()) for name, value in self._proxy.authorization]
        try:
            async with asyncio.timeout(None) as limit:
                lease.on_expire = lambda: limit.reschedule(asyncio.get_running_loop().time())
                self._worker = await connect(
                    url,
                    additional_headers=headers,
                    max_size=None,
                    compression=None,
                    open_timeout=_CONNECT_LIMIT_S,
                    ping_interval=None,  # health checks do that; a slow client must not make a worker look dead
                    close_timeout=1.0,
                    proxy=None,
                )
                return await self._with_worker(lease)
        except TimeoutError:  # before OSError, which it is a kind of
            if self._worker is None:
                raise WorkerFailed("it did not take the connection in time", lost=True) from None
            if self.generating and not lease.client_stalled:
                raise WorkerFailed("no sign of life within gateway.worker_lease_s", lost=True) from None
            raise TurnError(_expired()) from None
        except (WebSocketException, OSError) as error:
            raise WorkerFailed(f"{type(error).__name__}: {error}", lost=True) from None
        finally:
            if self._worker is not None:  # at once: whatever of the turn is still there is not wanted
                self._worker.transport.abort()
            self._worker = None

    async def _with_worker(self, lease: Lease) -> Frame:
        cached = await self._prefill_there(lease)
        lease.begun()
        self._pool.counted(lease, _reason(lease, cached), cached)
        await self._may_generate.wait()
        lease.touch()
        assert self._generate is not None and self._worker is not None
        frame = self._generate
        if self._tokens:
            text = "".join(self._text)
            frame = {**frame, "resume": {"token_ids": self._tokens, "chars": len(text), "text": text}}
            self._pool.continued += 1
            self._moves += 1
        await self._tell_worker(frame)
        if self._stopping:
            await self._tell_worker({"type": "stop"})
        while (done := await self._relay(lease, await self._hear(lease))) is None:
            pass
        return done

    async def _prefill_there(self, lease: Lease) -> int:
        """Returns the cached tokens. On a hit only what is new goes, once the worker has confirmed its epoch."""
        answer = None
        if lease.epoch is not None:
            fields = {"messages": self._new, "clear_kv_cache": False, "epoch": lease.epoch}
            answer = await self._ask_prefill(lease, fields)
            if answer["type"] == "error" and answer["code"] == "epoch_mismatch":
                answer, lease.epoch = None, None
        if answer is None:
            fields = {"messages": self._messages, "clear_kv_cache": True, "epoch": None}
            answer = await self._ask_prefill(lease, fields)
        self._check(answer, "prefill_done")
        self._final = None
        if not self._prefilled:
            self._prefilled = True
            with lease.to_client:
                await self._send(answer)
        return int(answer["cached_tokens"])

    async def _ask_prefill(self, lease: Lease, fields: Frame) -> Frame:
        """The worker's answer. It may be ending the turn before, whose client has gone: then it is asked again."""
        for _ in range(_BUSY_TRIES):
            await self._tell_worker({**self._prefill, **fields})
            answer = await self._hear(lease)
            if answer["type"] != "error" or answer["code"] != "session_busy":
                break
            await asyncio.sleep(_BUSY_PAUSE_S)
        return answer

    async def _relay(self, lease: Lease, frame: Frame, *, last: bool = False) -> Frame | None:
        """One frame of the answer goes to the client, but the last one, which is returned."""
        if frame["type"] == "chunk" and frame["is_final"]:
            self._final = frame  # until done is here: another worker would send one, too
            return None
        if frame["type"] == "chunk":
            frame["is_final"] = last
            ids = frame.pop("token_ids", None) or []
            self._tokens += ids
            self._text.append(frame["text_delta"] or "")
            frame["chunk_index"] = self._chunks
            self._chunks += 1
            if self._asked_ids:
                frame["token_ids"] = ids
            with lease.to_client:
                await self._send(frame)
            return None
        if frame["type"] == "error" and frame["code"] == "speech_failed":
            with lease.to_client:
                await self._send(frame)
            return None
        self._check(frame, "done")
        if self._final is not None:
            final, self._final = self._final, None
            final["is_final"] = False
            await self._relay(lease, final, last=True)
        answered = [*self._messages, {"role": "assistant", "content": "".join(self._text)}]
        lease.keep(history_hash(answered) if self._hashed else None, frame["epoch"], frame["token_stats"]["total"])
        assert lease.place is not None
        self.kept = lease.worker, lease.place
        lease.release(ok=True)
        if self._moves:
            frame["moves"] = self._moves
        return frame

    def _check(self, frame: Frame, wanted: str) -> None:
        """Raises WorkerFailed for errors that are the worker's, TurnError for those that are the turn's."""
        if frame["type"] == wanted:
            return
        if frame["type"] != "error":
            raise WorkerFailed(f"{frame['type']} came instead of {wanted}")
        if frame["code"] in _WORKERS_FAULT:
            raise WorkerFailed(f"{frame['code']}: {frame['message']}", lost=True)
        if frame["code"] in ("queue_full", "session_busy"):
            raise WorkerFailed(f"{frame['code']}: {frame['message']}", full=True)
        raise TurnError(frame)

    async def _tell_worker(self, frame: Frame) -> None:
        assert self._worker is not None
        await self._worker.send(msgspec.json.encode(frame).decode())

    async def _hear(self, lease: Lease) -> Frame:
        assert self._worker is not None
        data = await self._worker.recv()
        lease.touch()
        frame = msgspec.json.decode(data)
        if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
            raise WorkerFailed("it does not speak this protocol")
        return frame


def _reason(lease: Lease, cached_tokens: int) -> str:
    """A hit that was none after all is `stale`: the worker has another epoch, or has forgotten the KV."""
    return "stale" if lease.reason == "hit" and (lease.epoch is None or not cached_tokens) else lease.reason


def _expired() -> Frame:
    message = "nothing has happened for gateway.worker_lease_s: the turn is over"
    return {"type": "error", "code": "lease_expired", "message": message}
