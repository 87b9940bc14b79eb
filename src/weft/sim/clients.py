"""The clients of a simulation: what they send, how they read, and when they lose patience.

A slow reader takes whatever has come once in a while: until then its tokens merge into one piece, which holds no more
than its own answer and holds nobody up. What it decides by what it has read, it decides as late as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from weft.core.errors import QueueFullError, WeftError
from weft.core.plan import Int32s
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.engine.trace import Header
from weft.scheduler.scheduler import Update
from weft.sim.driver import Driver
from weft.sim.measure import Measure
from weft.sim.witness import Breach, Witness
from weft.sim.workload import NEVER, Author, Conversation, Turn

TEXT_DELAY_S = 0.001
"""From a token to the engine hearing that it completed a stop string: by then the next step is under way."""

Schedule = Callable[[float, Callable[[], None]], None]
"""Does something at a time."""


@dataclass(slots=True)
class Client:
    """One turn under way. `pile`: tokens that have come but were not read; `read`: those that were."""

    turn: Turn
    conversation: Conversation
    index: int
    request: Request
    pile: int = 0
    read: int = 0
    looking: bool = False
    ended: bool = False


class Clients:
    """See the module's docstring.

    Args:
        author: who draws the conversations.
        driver: the scheduler.
        witness, measure: who follow what happens.
        at: how something is put off.

    Attributes:
        sent: requests sent so far. largest_pile: most tokens that one slow reader had waiting.
    """

    def __init__(
        self, author: Author, header: Header, driver: Driver, witness: Witness, measure: Measure, at: Schedule
    ) -> None:
        self.sent = 0
        self.largest_pile = 0
        self._author = author
        self._driver = driver
        self._witness = witness
        self._measure = measure
        self._at = at
        self._clients: dict[int, Client] = {}
        self._histories: dict[int, Int32s] = {}  # by the id of a conversation's first request
        self._context = header.model.max_context_tokens
        self._max_len = min(self._context, header.cache.capacity)
        self._sessions = header.cache.retain == "prefix"  # without it the server keeps nothing, and refuses them
        self._max_output = header.limits.max_output_tokens
        # Output length from which on somebody has to look at a request's tokens one by one.
        self._watch = np.full(len(witness.output_lens), NEVER, dtype=np.int64)
        self._conversations = author.conversations()
        self._next_conversation()

    # ---- what clients do --------------------------------------------------------------------------------------

    def _next_conversation(self) -> None:
        conversation = next(self._conversations, None)
        if conversation is not None:
            self._at(conversation.start_s, partial(self._begin, conversation))

    def _begin(self, conversation: Conversation) -> None:
        self._next_conversation()
        self._send(conversation, 0, conversation.start_s)

    def _send(self, conversation: Conversation, index: int, arrival_s: float) -> None:
        turn = conversation.turns[index]
        self.sent += 1
        prompt = self._prompt(conversation, turn)
        after = turn.deadline_after_s
        outcome = self._driver.add(
            turn.request_id,
            prompt,
            self._fitting(turn, len(prompt)),
            priority=turn.priority,
            arrival_s=arrival_s,
            deadline_s=None if after is None else arrival_s + after,
            session_id=conversation.session_id if self._sessions else None,
            session_ttl_s=conversation.session_ttl_s if self._sessions else None,
            adapter=turn.adapter,
        )
        if isinstance(outcome, WeftError):
            self._histories[conversation.turns[0].request_id] = prompt
            self._measure.note_refusal(outcome.code)
            wait_s = outcome.retry_after_s if isinstance(outcome, QueueFullError) else 0.0
            self._next_turn(conversation, index, wait_s)
            return
        self._witness.accept(outcome)
        client = Client(turn, conversation, index, outcome)
        self._clients[turn.request_id] = client
        self._watch[turn.request_id] = 0 if turn.read_interval_s else min(turn.stop_at, turn.cancel_at)
        if turn.cancel_after_s is not None:
            self._at(arrival_s + turn.cancel_after_s, partial(self._abort, turn.request_id))
        if self._sessions and conversation.ends_session and index + 1 == len(conversation.turns):
            self._at(arrival_s + turn.think_s, partial(self._end_session, client))

    def _abort(self, request_id: int) -> None:
        is_open = request_id in self._witness.open
        if is_open:
            self._witness.cancelled[request_id] = None
        if self._driver.abort(request_id, self._driver.now_s) != is_open:
            raise Breach(f"request {request_id}: open is {is_open}, but not for the scheduler")

    def _complete(self, request_id: int) -> None:
        is_open = request_id in self._witness.open
        if is_open:
            self._witness.completed[request_id] = None
        if self._driver.complete(request_id) != is_open:
            raise Breach(f"request {request_id}: open is {is_open}, but not for the scheduler")

    def _end_session(self, client: Client) -> None:
        if not client.ended:
            self._witness.cancelled[client.turn.request_id] = None
        assert client.conversation.session_id is not None
        self._driver.end_session(client.conversation.session_id)

    def _next_turn(self, conversation: Conversation, index: int, wait_s: float = 0.0) -> None:
        if index + 1 < len(conversation.turns):
            time_s = self._driver.now_s + wait_s + conversation.turns[index + 1].think_s
            self._at(time_s, partial(self._send, conversation, index + 1, time_s))
        else:
            self._histories.pop(conversation.turns[0].request_id, None)

    # ---- what clients get -------------------------------------------------------------------------------------

    def deliver(self, updates: list[Update]) -> None:
        """Hands tokens and endings out. Raises Breach."""
        ids: list[int] = []
        tokens: list[int] = []
        ended: dict[int, Update] = {}
        still_open = self._witness.open
        for update in updates:
            request_id = update.request.request_id
            if request_id not in still_open or request_id in ended:
                raise Breach(f"request {request_id}: an update for a request that is not open")
            for token in update.tokens:
                ids.append(request_id)
                tokens.append(token)
            if update.ending is not None:
                ended[request_id] = update
        if ids:
            several = len(dict.fromkeys(ids)) != len(ids)
            batches = [([i], [t]) for i, t in zip(ids, tokens, strict=True)] if several else [(ids, tokens)]
            for batch in batches:
                self._hand_out(*batch)
        for update in ended.values():
            self._end(update)

    def _hand_out(self, ids: list[int], tokens: list[int]) -> None:
        now = self._driver.now_s
        rows = np.array(ids)
        self._witness.see_tokens(rows, np.array(tokens))
        self._measure.note_tokens(now, ids)
        for row in np.flatnonzero(self._witness.output_lens[rows] >= self._watch[rows]).tolist():
            client = self._clients[ids[row]]
            turn = client.turn
            if self._witness.output_lens[turn.request_id] == turn.stop_at:
                self._at(now + TEXT_DELAY_S, partial(self._complete, turn.request_id))
            if turn.read_interval_s:
                client.pile += 1
                self.largest_pile = max(self.largest_pile, client.pile)
                if not client.looking:
                    client.looking = True
                    self._at(now + turn.read_interval_s, partial(self._look, client))
            elif self._witness.output_lens[turn.request_id] == turn.cancel_at:
                self._at(now, partial(self._abort, turn.request_id))

    def _look(self, client: Client) -> None:
        """A slow reader takes what has come."""
        client.looking = False
        before, client.read = client.read, client.read + client.pile
        client.pile = 0
        if client.ended:
            self._next_turn(client.conversation, client.index)
        elif before < client.turn.cancel_at <= client.read:
            self._abort(client.turn.request_id)

    def _end(self, update: Update) -> None:
        self._witness.see_ending(update)
        self._measure.note_ending(update)
        client = self._clients.pop(update.request.request_id)
        client.ended = True
        self._histories[client.conversation.turns[0].request_id] = update.request.tokens
        if client.turn.cancel_late:
            self._at(self._driver.now_s, partial(self._abort, client.turn.request_id))
        if not client.pile:
            self._next_turn(client.conversation, client.index)

    # ---- prompts ----------------------------------------------------------------------------------------------

    def _prompt(self, conversation: Conversation, turn: Turn) -> Int32s:
        history = self._histories.get(conversation.turns[0].request_id, conversation.beginning)
        words = self._author.words(*turn.words)
        if len(history) + len(words) + 1 >= self._max_len:  # as chat clients do: forget, begin anew
            history = conversation.beginning
        return np.concatenate([history, words])

    def _fitting(self, turn: Turn, prompt_len: int) -> SamplingParams:
        """The turn's parameters within what the server allows; one client in eight does not care, and is refused."""
        params = turn.params
        most = self._context - prompt_len
        if self._max_output is not None:
            most = min(most, self._max_output)
        if params.max_new_tokens is None or params.max_new_tokens <= most or most < 1 or turn.request_id % 8 == 0:
            return params
        changed: dict[str, Any] = {"max_new_tokens": most, "min_tokens": min(params.min_tokens, most)}
        return replace(params, **changed)
