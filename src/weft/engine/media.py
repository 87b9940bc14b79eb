"""Decoded media between processes: `Medium` to `MediaItem` and back, and the spans of a prompt that stand for them."""

from __future__ import annotations

import numpy as np

from weft.core.errors import InvariantError
from weft.core.media import MediaSpan, Medium
from weft.ipc.messages import MediaItem, MediaPlace
from weft.media.hashing import media_keys

_DTYPES = {"image": "|u1", "audio": "<f4"}


def item_of(medium: Medium) -> MediaItem:
    """A copy of the samples, as bytes."""
    samples = np.asarray(medium.samples, dtype=_DTYPES[medium.kind])
    return MediaItem(medium.kind, list(samples.shape), medium.digest, samples.tobytes())


def medium_of(item: MediaItem) -> Medium:
    samples = np.frombuffer(item.data, dtype=_DTYPES[item.kind]).reshape(item.shape)
    return Medium(item.kind, item.digest, samples)


def spans_of(media: list[MediaPlace], prompt_tokens: int, adapter: int) -> tuple[MediaSpan, ...]:
    """What a Submit says of its media. Raises InvariantError for places that overlap or lie outside the prompt."""
    spans: list[MediaSpan] = []
    end = 0
    for place in media:
        if not end <= place.start < place.end <= prompt_tokens:
            raise InvariantError(f"a medium stands for tokens {place.start} to {place.end} of {prompt_tokens}")
        end = place.end
        keys = media_keys(place.item.digest, place.end - place.start, adapter)
        spans.append(MediaSpan(place.start, medium_of(place.item), keys))
    return tuple(spans)
