"""What streaming sessions have said so far: one `Conversation` for each, in memory, within bounds.

Invariants: a conversation is in one turn at most, and changes only by a turn's `commit`, which gives it a new epoch; a
turn that ends without one leaves nothing behind. There are at most `most` of them: for one more, the idle one that was
unused for longest gives way. An idle one is forgotten `kv_cache.session_ttl_s` after its last turn, by a timer of its
own. With a conversation goes the lease that keeps its KV in the engine; of the KV itself nothing is known here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.config.settings import KvCacheSettings
from weft.core.errors import InvalidRequestError, NotFoundError, QueueFullError, WeftError

Messages = list[dict[str, Any]]


class BusyTurn(Protocol):
    """A turn under way, as seen from here."""

    state: str

    def stop(self) -> bool:
        """Ends its answer early; False when there was nothing to stop."""

    def abandon(self, error: WeftError) -> None:
        """Ends it without a commit; its client is told this error."""


@dataclass(slots=True)
class Conversation:
    """One session's messages; `epoch` names this state of them. `fresh`: no turn was committed yet."""

    id: str
    epoch: str
    messages: Messages = field(default_factory=list)
    fresh: bool = True
    turn: BusyTurn | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        return "idle" if self.turn is None else self.turn.state


@dataclass(frozen=True, slots=True)
class Commit:
    """A change that was made, and what there was before."""

    conversation: Conversation
    epoch: str
    messages_before: Messages
    fresh_before: bool


class Conversations:
    """All conversations of a worker; `Server.conversations`.

    Attributes:
        single: only one at a time, as servers without sharing of KV have it.
        keeps_kv: False once it is known that the engine keeps no KV between requests.
    """

    def __init__(
        self, most: int, kv_cache: KvCacheSettings, boot_id: str, *, end_lease: Callable[[str], Awaitable[None]]
    ) -> None:
        self.single = most == 1
        self.keeps_kv = kv_cache.retain != "none"
        self._most = most
        self._ttl_s = kv_cache.session_ttl_s
        self._boot_id = boot_id
        self._end_lease = end_lease
        self._numbers = itertools.count(1)
        self._all: dict[str, Conversation] = {}  # the one unused for longest first
        self._ending: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._all.values()))

    def get(self, session_id: str) -> Conversation | None:
        return self._all.get(session_id)

    # ---- turns ------------------------------------------------------------------------------------------------

    def begin(self, session_id: str, turn: BusyTurn, epoch: str | None, retry_after_s: float) -> Conversation:
        """The conversation, with this turn under way. `epoch`: the one that it has to have.

        Raises InvalidRequestError (`session_busy`, `epoch_mismatch`), or QueueFullError when all are in a turn.
        """
        conversation = self._all.get(session_id)
        if conversation is not None and conversation.turn is not None:
            text = f"session {session_id!r} has a turn under way on another connection"
            raise InvalidRequestError(text, code="session_busy")
        if epoch is not None and (conversation is None or conversation.epoch != epoch):
            now = "not known here" if conversation is None else f"at {conversation.epoch}"
            text = f"epoch: {epoch[:80]!r} is not the conversation's present one: it is {now}"
            raise InvalidRequestError(text, param="epoch", code="epoch_mismatch")
        if conversation is None:
            self._make_room(retry_after_s)
            conversation = self._all[session_id] = Conversation(session_id, self._new_epoch())
        conversation.turn = turn
        self._stop_timer(conversation)
        return conversation

    def commit(self, conversation: Conversation, messages: Messages) -> Commit:
        """The turn is over, and these are the conversation's messages now."""
        before = Commit(conversation, self._new_epoch(), conversation.messages, conversation.fresh)
        conversation.messages, conversation.epoch, conversation.fresh = messages, before.epoch, False
        self.end(conversation)
        return before

    def undo(self, commit: Commit) -> None:
        """Takes a commit back of which the client was not told, unless something has happened since."""
        conversation = commit.conversation
        if conversation.epoch != commit.epoch or conversation.turn is not None:
            return
        conversation.messages, conversation.fresh = commit.messages_before, commit.fresh_before
        conversation.epoch = self._new_epoch()
        self.end(conversation)

    def end(self, conversation: Conversation) -> None:
        """The turn is over; harmless when repeated. What never had a commit is forgotten."""
        conversation.turn = None
        if self._all.get(conversation.id) is not conversation:
            return
        if conversation.fresh:
            self._drop(conversation)
            return
        del self._all[conversation.id]
        self._all[conversation.id] = conversation
        self._stop_timer(conversation)
        conversation.timer = asyncio.get_running_loop().call_later(self._ttl_s, self._drop, conversation)

    # ---- forgetting -------------------------------------------------------------------------------------------

    def forget(self, session_id: str, error: WeftError) -> Conversation | None:
        """Forgets a conversation, if there is one; a turn of it ends with `error`. Its lease is the caller's to end."""
        conversation = self._all.pop(session_id, None)
        if conversation is not None:
            self._stop_timer(conversation)
            if conversation.turn is not None:
                conversation.turn.abandon(error)
        return conversation

    def stop(self, session_id: str | None) -> int:
        """Stops the answer of one session, or of all; how many there were. Raises NotFoundError."""
        if session_id is not None and session_id not in self._all:
            raise NotFoundError(f"session_id: session {session_id[:80]!r} is not known here", param="session_id")
        chosen = self if session_id is None else [self._all[session_id]]
        return sum(conversation.turn.stop() for conversation in chosen if conversation.turn is not None)

    def end_lease(self, session_id: str) -> None:
        """Lets the engine forget a session's KV; `settled` waits until it has."""
        if not self.keeps_kv:
            return
        task = asyncio.get_running_loop().create_task(self._end_lease_after(self._ending.get(session_id), session_id))
        self._ending[session_id] = task
        task.add_done_callback(lambda _: self._ending.get(session_id) is task and self._ending.pop(session_id))

    async def settled(self, session_id: str) -> None:
        """Returns when no lease of this session is being ended: that would end its new requests, too."""
        task = self._ending.get(session_id)
        if task is not None:
            await asyncio.wait((task,))

    async def _end_lease_after(self, before: asyncio.Task[None] | None, session_id: str) -> None:
        if before is not None:
            await asyncio.wait((before,))
        await self._end_lease(session_id)

    def _make_room(self, retry_after_s: float) -> None:
        if len(self._all) < self._most:
            return
        idle = next((conversation for conversation in self._all.values() if conversation.turn is None), None)
        if idle is not None:
            self._drop(idle)
        elif self.single:
            text = "another session has a turn under way, and http.max_sessions is 1"
            raise InvalidRequestError(text, code="session_busy")
        else:
            text = f"all {self._most} conversations are in a turn (the setting http.max_sessions)"
            raise QueueFullError(text, retry_after_s=retry_after_s)

    def _drop(self, conversation: Conversation) -> None:
        if self._all.get(conversation.id) is conversation:
            del self._all[conversation.id]
            self._stop_timer(conversation)
            self.end_lease(conversation.id)

    def _stop_timer(self, conversation: Conversation) -> None:
        if conversation.timer is not None:
            conversation.timer.cancel()
            conversation.timer = None

    def _new_epoch(self) -> str:
        return f"{self._boot_id}-{next(self._numbers)}"
