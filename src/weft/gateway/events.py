"""Reads along in a worker's server-sent events: what the client is to get, and what is needed to go on elsewhere.

A worker tells the gateway the token ids of an event in a comment line before its data; the line is taken out here.
Events pass on whole or not at all, so the tokens noted are exactly those whose text the client was sent. What tells
that a choice is finished waits for the end of the stream, which comes with it: cut in between, it would be told twice.
"""

from __future__ import annotations

import msgspec

_TOKENS = b": tokens "
_ERROR = b"event: error"
_DONE = b"data: [DONE]"
_FINISHED = b'"finish_reason":"'  # inside text, its quotes would be escaped


class EventReader:
    """One worker's stream.

    `begun`: some of the answer was passed on; `done`: it has ended properly; `failure`: with an error that is the
    worker's.
    """

    def __init__(self, *, hold: bool = True) -> None:
        """`hold`: keep finishes back; pointless where the stream cannot go on elsewhere."""
        self._hold = hold
        self.begun = self.done = False
        self.failure: str | None = None
        self._tokens: list[bytes] = []
        self._rest = b""
        self._finish: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> bytes:
        """What of this, and of what was held back before, the client is to be sent now."""
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n\n")
        if end < 0:
            self._rest = data
            return b""
        self._rest = data[end + 2 :]
        passed: list[bytes] = []
        for event in data[:end].split(b"\n\n"):
            ids = b""
            if event.startswith(_TOKENS):
                ids, _, event = event[len(_TOKENS) :].partition(b"\n")
            if event.startswith(_ERROR):
                self.failure = _workers_fault(event)
                if self.failure is not None:
                    break
                self.done = True
            elif event == _DONE:
                self.done = True
            if self._hold and (self._finish or _FINISHED in event):
                self._finish.append((ids, event))
            else:
                self._pass(ids, event, passed)
        if self.done:
            for ids, event in self._finish:
                self._pass(ids, event, passed)
            self._finish.clear()
        return b"\n\n".join(passed) + b"\n\n" if passed else b""

    def _pass(self, ids: bytes, event: bytes, passed: list[bytes]) -> None:
        if ids:
            self._tokens.append(ids)
        if event:
            self.begun = self.begun or not event.startswith(b":")
            passed.append(event)

    def token_ids(self) -> list[int]:
        """All tokens of the events that were passed on."""
        return [int(text) for ids in self._tokens for text in ids.split(b",")]


def _workers_fault(event: bytes) -> str | None:
    """The message of an error that another worker need not have: this one died, or shuts down."""
    try:
        error = msgspec.json.decode(event[event.index(b"data:") + 5 :])["error"]
        return str(error["message"]) if error["type"] == "service_unavailable" else None
    except (ValueError, KeyError, TypeError, msgspec.DecodeError):
        return None
