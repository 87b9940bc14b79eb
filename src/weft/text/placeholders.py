"""Where media stand in a prompt: what a template writes for one becomes as many tokens as the engine makes of it.

Templates write a fixed text for {"type": "image"} or {"type": "audio"}. A client could write the same text, which would
shift every medium behind it; so the number of texts must be that of the media, or the request is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.core.errors import InvalidRequestError
from weft.core.media import Modality

NumTokens = Callable[[Sequence[int]], int]
"""From the shape of a medium's samples to the number of tokens that stand for it, at least 1."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands for media of one kind: `text` in a rendered chat, `num_tokens` times `token_id` in a prompt."""

    text: str
    token_id: int
    num_tokens: NumTokens


Placeholders = Mapping[Modality, Placeholder]
Shape = tuple[Modality, Sequence[int]]
"""Kind and shape of one medium."""


def expanded(
    text: str, media: Sequence[Shape], placeholders: Placeholders, encode: Callable[[str], list[int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a rendered chat, and for each medium in order the tokens [start, end) that stand for it.

    `encode` is asked for the text between them, which a tokenizer never joins across such special tokens. Raises
    InvalidRequestError where text and media do not agree.
    """
    by_text = {placeholder.text: kind for kind, placeholder in placeholders.items()}
    pattern = "|".join(re.escape(name) for name in sorted(by_text, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text) if by_text else [text]
    found = [by_text[piece] for piece in pieces[1::2]]
    if found != [kind for kind, _ in media]:
        raise InvalidRequestError(
            f"messages: the chat has {len(media)} images and sounds, but its template wrote {len(found)} placeholders"
            f" for them, or others; no text may contain {' or '.join(map(repr, by_text))}",
            param="messages",
            code="unsupported_content",
        )
    ids = encode(pieces[0]) if pieces[0] else []
    spans: list[tuple[int, int]] = []
    for (kind, shape), after in zip(media, pieces[2::2], strict=True):
        placeholder = placeholders[kind]
        start = len(ids)
        ids += [placeholder.token_id] * placeholder.num_tokens(shape)
        spans.append((start, len(ids)))
        ids += encode(after) if after else []
    return ids, spans
