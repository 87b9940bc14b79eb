"""Incremental detokenizing: token ids in, the text that is certain out.

What is pushed out is never taken back: joined pieces plus `flush()` equal `Tokenizer.decode` of the whole sequence,
however the ids are cut into pushes. No piece ends inside a character: bytes that are not yet a character wait for the
next token. The cost of a token does not depend on how long the sequence is.

With `prompt_ids` the text continues the prompt: a space that the decoder would strip at the start of a text is kept,
and a character that the prompt's last token began is completed. In other words, what a detokenizer gives for the
prompt, followed by what is streamed here, equals the text of both decoded as one sequence.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from weft.text.token_table import TokenTable

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(ABC):
    """The detokenizer of one request. Not thread-safe; its tables are shared with all others of the tokenizer."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that becomes certain with these ids; "" while a character is incomplete. Unknown ids give ""."""
        return "".join(map(self.push_one, ids))

    @abstractmethod
    def push_one(self, token_id: int) -> str:
        """`push` of a single id."""

    @abstractmethod
    def flush(self) -> str:
        """What is still held at the end: bytes that never became a character, as U+FFFD. A second call gives ""."""


class ByteDetokenizer(IncrementalDetokenizer):
    """Exact: looks each token's bytes up and runs them through an incremental UTF-8 decoder. At most 3 bytes wait."""

    def __init__(self, table: TokenTable, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._pieces = table.view(skip_special_tokens=skip_special_tokens)
        self._size = len(self._pieces)
        self._first_pieces = table.first_pieces
        self._at_start = True
        self._strip_left = table.strip_left
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)
        self._continue(prompt_ids)

    def _continue(self, prompt_ids: Sequence[int]) -> None:
        # Four bytes fix the decoder's state: it depends on nothing before the last lead byte, at most three bytes back.
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._pieces[token_id] if 0 <= token_id < self._size else None
            if piece is None:
                continue
            self._at_start = False
            tail = piece + tail
            if len(tail) >= 4:
                break
        if tail:
            self._strip_left = 0
        self._decoder.decode(tail[-4:])

    def push_one(self, token_id: int) -> str:
        piece = self._pieces[token_id] if 0 <= token_id < self._size else None
        if piece is None:
            return ""
        if self._at_start:
            self._at_start = False
            piece = self._first_pieces.get(token_id, piece)
        text = self._decoder.decode(piece)
        return self._strip(text) if self._strip_left else text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._strip(text)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDetokenizer(IncrementalDetokenizer):
    """For decoders that are no per-token rule: decodes a window of few tokens twice and emits the difference.

    The window is the tokens of the last emission (context, so that rules about the first token of a text do not strike
    in its middle) and those not emitted yet. A text that ends in U+FFFD waits for the next token, but for no more than
    `max_pending_tokens`, so the window stays bounded whatever the model produces. The idea is that of
    text-generation-inference's and vLLM's prefix and read offsets.
    """

    max_pending_tokens = 8
    context_tokens = 4

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_visible: Callable[[int], bool],
        *,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`decode` gives the text of ids, all of which `is_visible` let through."""
        self._decode = decode
        self._is_visible = is_visible
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        visible: Iterable[int] = filter(is_visible, reversed(prompt_ids))
        self.push(list(islice(visible, self.context_tokens))[::-1])

    def push_one(self, token_id: int) -> str:
        if not self._is_visible(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        unsure = text.endswith(_REPLACEMENT) or len(text) <= len(self._context_text)
        if unsure and len(self._pending) <= self.max_pending_tokens:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return new_text
