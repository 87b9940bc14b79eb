"""The media of a chat: where they stand, whether an engine takes them, and what they decode to.

Messages come with `MediaPart`s in their lists of contents and leave with the placeholders of chat templates
({"type": "image"}, {"type": "audio"}, Hugging Face's form), their media in order beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.settings import MediaSettings
from weft.core.errors import InvalidRequestError
from weft.core.media import Medium
from weft.media.audio import SAMPLE_RATE, decode_audio
from weft.media.hashing import media_digest
from weft.media.images import decode_image
from weft.media.parts import PART_TYPES, MediaPart, media_part

Messages = Sequence[Mapping[str, Any]]
NOUNS = {"image": "images", "audio": "sound"}


@dataclass(slots=True)
class _Budget:
    """What the limits leave for the rest of a request."""

    pixels: int
    seconds: float


def with_parts(messages: Messages) -> list[dict[str, Any]]:
    """The messages with a MediaPart in the place of each media part. Raises InvalidRequestError."""
    result = [dict(message) for message in messages]
    for i, message in enumerate(result):
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [_parsed(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
    return result


def _parsed(part: Any, where: str) -> Any:
    known = isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in PART_TYPES
    return media_part(part, where) if known else part


def places(messages: Messages) -> Iterator[tuple[str, MediaPart]]:
    """Every media part with its name in errors."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                if isinstance(part, MediaPart):
                    yield f"messages[{i}].content[{j}]", part


def has_media(messages: Messages | None) -> bool:
    return messages is not None and next(places(messages), None) is not None


def check_taken(messages: Messages, features: Collection[str], engine: str) -> None:
    """Raises InvalidRequestError for the first part that an engine with these features does not take."""
    for where, part in places(messages):
        if part.kind not in features:
            raise InvalidRequestError(
                f"{where}: this model does not take {NOUNS[part.kind]} (the {engine} engine has no {part.kind!r}"
                " feature)",
                param=where,
                code="unsupported_content",
            )


def decoded(messages: Messages, limits: MediaSettings) -> tuple[list[dict[str, Any]], list[Medium]]:
    """The messages with placeholders, and their media. Raises InvalidRequestError.

    This takes time, and holds Python's lock for some of it. Together the images of a request have at most
    `max_image_pixels`, its sounds `max_audio_s`, so that what it takes in memory is bounded.
    """
    found = list(places(messages))
    if len(found) > limits.max_parts:
        text = f"messages: {len(found)} images and sounds are too many (allowed: {limits.max_parts}, media.max_parts)"
        raise InvalidRequestError(text, param="messages")
    left = _Budget(limits.max_image_pixels, limits.max_audio_s)
    media = [_decode(part, where, limits, left) for where, part in found]
    return [_with_placeholders(message) for message in messages], media


def _decode(part: MediaPart, where: str, limits: MediaSettings, left: _Budget) -> Medium:
    if part.kind == "audio":
        sound = decode_audio(part.data, part.format, where, left.seconds)
        left.seconds -= len(sound) / SAMPLE_RATE
        return Medium("audio", media_digest("audio", sound), sound)
    if len(part.data) > limits.max_image_bytes:
        text = (
            f"{where}: {len(part.data)} bytes are too many for an image (allowed: {limits.max_image_bytes}, the setting"
            " media.max_image_bytes)"
        )
        raise InvalidRequestError(text, param=where)
    if part.detail == "low":  # "high" and "auto" are what is done: the image as it is
        text = f"{where}: detail 'low' is not supported in this version (allowed: auto, high)"
        raise InvalidRequestError(text, param=f"{where}.image_url.detail", code="unsupported_parameter")
    pixels = decode_image(part.data, part.format, where, left.pixels)
    left.pixels -= pixels.shape[0] * pixels.shape[1]
    return Medium("image", media_digest("image", pixels), pixels)


def _with_placeholders(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [{"type": part.kind} if isinstance(part, MediaPart) else part for part in content]
    return {**message, "content": parts}
