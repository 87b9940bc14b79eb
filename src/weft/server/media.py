"""Images and sound in a checked body: refused where the engine does not take them, else decoded in threads.

`read_body` leaves `MediaPart`s in messages; `MediaDesk.taken` puts a `MediaItem`, decoded and ready to travel, in the
place of each. Decoders let go of Python's lock for most of their work, and few of them run at a time, which bounds the
memory that decoding takes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from weft.config.settings import MediaSettings
from weft.core.media import Medium
from weft.engine.client import ModelFacts
from weft.engine.media import item_of
from weft.ipc.messages import MediaItem
from weft.media.messages import check_taken, decoded, places, replaced, split
from weft.media.parts import MediaPart

DECODERS = 2

Messages = list[dict[str, Any]]


class MediaDesk:
    """Of one server; used from one event loop."""

    def __init__(self, facts: ModelFacts, limits: MediaSettings) -> None:
        self._facts = facts
        self._limits = limits
        self._slots = asyncio.Semaphore(DECODERS)

    async def taken(self, messages: Messages) -> Messages:
        """The messages with their media decoded. Raises InvalidRequestError, at once for what the engine lacks."""
        if next(places(messages, MediaPart), None) is None:
            return messages
        self.check(messages)
        async with self._slots:
            return await asyncio.to_thread(_decode, messages, self._limits)

    def check(self, messages: Messages) -> None:
        """Raises InvalidRequestError for the first part that the engine does not take."""
        check_taken(messages, self._facts.features, self._facts.backend)


def without_samples(messages: Messages) -> tuple[Messages, list[MediaItem]]:
    """For a TextQuery: the messages with placeholders, and what it needs of the media."""
    plain, media = split(messages, MediaItem)
    return plain, [msgspec.structs.replace(item, data=b"") for item in media]


def _decode(messages: Messages, limits: MediaSettings) -> Messages:
    return replaced(decoded(messages, limits), Medium, lambda _, medium: item_of(medium))
