"""The text of one request: detokenizing and stop strings joined.

Invariant: for every way of cutting the ids into pushes, the joined texts plus `finish()` are the same string, namely
the whole decoded text, cut at the first stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.text.stop import StopMatcher

if TYPE_CHECKING:
    from weft.text.tokenizer import BaseTokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one push brought.

    `text` may be sent to the client. `matched_stop` is the stop string that ended the text, else None. `tokens_used` of
    the pushed ids were consumed, the one that completed the stop string being the last; the others are void.
    `token_texts` has `tokens_used` entries: the text that became certain with each id, before stop strings are cut or
    held back ("" for half a character or a hidden token). Running sums of their lengths are OpenAI's `text_offset`.
    """

    text: str
    matched_stop: str | None
    tokens_used: int
    token_texts: list[str] = field(default_factory=list)


class TextStream:
    """Kept per request by whoever detokenizes. Not thread-safe.

    A token that ended the generation (end of sequence, stop token id) and shall not be seen must not be pushed, unless
    it is special and `skip_special_tokens` hides it.
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings are looked for only in the text after the first `min_tokens` tokens, as vLLM does."""
        self._detokenizer = tokenizer.detokenizer(prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._unchecked_tokens = min_tokens

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did; also set when `finish()` found it."""
        return self._matcher.matched

    def push(self, ids: Sequence[int]) -> TextPiece:
        """Consumes ids up to the end of the text. After a match all ids are void: `tokens_used` is 0."""
        texts: list[str] = []
        token_texts: list[str] = []
        for token_id in ids:
            if self.matched_stop is not None:
                break
            token_text = self._detokenizer.push_one(token_id)
            token_texts.append(token_text)
            if self._unchecked_tokens > 0:
                self._unchecked_tokens -= 1
                texts.append(token_text)
            else:
                texts.append(self._matcher.push(token_text).text)
        return TextPiece("".join(texts), self.matched_stop, len(token_texts), token_texts)

    def finish(self) -> str:
        """The rest of the text when no more ids come: held-back text and incomplete characters. Call it once."""
        last = self._matcher.push(self._detokenizer.flush())
        return last.text + self._matcher.flush()
