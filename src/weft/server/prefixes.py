"""Which prompts the engine still holds, as digests, for gateways that ask.

Only the API process sees prompts as text, and only the engine knows what it has forgotten; so this is an estimate: the
prompts that were used last, as many as their tokens fit into what the engine holds. It says so once a second; what was
computed since counts as held, or a gateway that asks in between would make them be forgotten for good. Nothing is kept
before the first gateway has asked.
"""

from __future__ import annotations

from collections import OrderedDict

from weft.ipc.messages import End, Heartbeat
from weft.media.messages import has_placeholders
from weft.server.values import Prompt
from weft.text.digests import Digests, chat_digests, ids_digests, text_digests

MAX_DIGESTS = 4096
_KEEP = 0.9  # of the average, per further prompt


class HeldPrefixes:
    """See the module's docstring.

    Attributes:
        version: changes with what is held.
        tokens_per_char: of the prompts so far; None while there was none.
    """

    def __init__(self) -> None:
        self.version = 0
        self.tokens_per_char: float | None = None
        self._asked = False
        self._tokens: OrderedDict[str, float] = OrderedDict()  # by digest: of its part of the prompt; oldest first
        self._total = 0.0
        self._beat: Heartbeat | None = None
        self._since = 0.0  # tokens that were noted since that beat

    def report(self, beat: Heartbeat) -> list[str]:
        """The digests, newest first, of prompts that the engine holds, going by its last sign of life."""
        self._asked = True
        self._hear(beat)
        held_tokens = beat.held_tokens + self._since
        while self._tokens and (self._total > held_tokens or len(self._tokens) > MAX_DIGESTS):
            _, tokens = self._tokens.popitem(last=False)
            self._total -= tokens
            self.version += 1
        return list(reversed(self._tokens))

    def note(self, prompt: Prompt, model: str, end: End, beat: Heartbeat) -> None:
        """A request has ended; its prompt counts if it was computed, as `decode_s` tells of one that was not completed.

        `model`: the name of its adapter; empty for the model itself. `beat`: the engine's last one.
        """
        computed = end.state == "completed" or end.decode_s
        if not self._asked or not computed or not end.prompt_tokens:
            return
        digests = digests_of(prompt, model)
        if not digests:
            return
        length = digests[-1][1]
        per_unit = end.prompt_tokens / max(1, length)
        if prompt.token_ids is None and length:
            mean = self.tokens_per_char
            self.tokens_per_char = per_unit if mean is None else _KEEP * mean + (1 - _KEEP) * per_unit
        self._hear(beat)
        before, total = 0, self._total
        for digest, upto in digests:
            self._total -= self._tokens.pop(digest, 0.0)
            self._tokens[digest] = (upto - before) * per_unit
            self._total += self._tokens[digest]
            before = upto
        self._since += max(0.0, self._total - total)
        self.version += 1
        while len(self._tokens) > 2 * MAX_DIGESTS:
            self._total -= self._tokens.popitem(last=False)[1]

    def clear(self) -> None:
        """The engine has forgotten everything."""
        self._tokens.clear()
        self._total = self._since = 0.0
        self.version += 1

    def _hear(self, beat: Heartbeat) -> None:
        if beat is not self._beat:
            self._beat, self._since = beat, 0.0


def digests_of(prompt: Prompt, model: str) -> Digests:
    if prompt.messages is not None and has_placeholders(prompt.messages):
        return []  # a gateway knows images as they came, which nobody here does any more
    if prompt.messages is not None:
        return chat_digests(prompt.messages, model)
    if prompt.token_ids is not None:
        return ids_digests(prompt.token_ids, model)
    return text_digests(prompt.text or "", model)
