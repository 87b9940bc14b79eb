"""The media of a chat: where they stand, whether an engine takes them, and what they decode to.

What stands in a message's list of contents for an image or a sound becomes, step by step: a `MediaPart` (`with_parts`),
a decoded `Medium` (`decoded`), and the placeholder that chat templates know, {"type": "image"} or {"type": "audio"} in
Hugging Face's form, with the media in order beside the messages (`split`). Callers' objects are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from weft.config.settings import MediaSettings
from weft.core.errors import InvalidRequestError
from weft.core.media import MODALITIES, Medium, Modality
from weft.media.audio import SAMPLE_RATE, decode_audio
from weft.media.hashing import media_digest
from weft.media.images import decode_image
from weft.media.parts import PART_TYPES, MediaPart, media_part


class _HasKind(Protocol):
    @property
    def kind(self) -> Modality: ...


T = TypeVar("T")
K = TypeVar("K", bound=_HasKind)

Messages = Sequence[Mapping[str, Any]]
NOUNS = {"image": "images", "audio": "sound"}


@dataclass(slots=True)
class _Budget:
    """What the limits leave for the rest of a request."""

    pixels: int
    seconds: float


def places(messages: Messages, of: type[T]) -> Iterator[tuple[str, T]]:
    """Every content part of this type with its name in errors."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                if isinstance(part, of):
                    yield f"messages[{i}].content[{j}]", part


def replaced(messages: Messages, of: type[T], by: Callable[[str, T], Any]) -> list[dict[str, Any]]:
    """The messages with `by(where, part)` for every content part of this type."""
    news = dict(places(messages, of))
    result = [dict(message) for message in messages]
    if not news:
        return result
    for i, message in enumerate(result):
        content = message.get("content")
        if isinstance(content, list):
            parts = ((f"messages[{i}].content[{j}]", part) for j, part in enumerate(content))
            message["content"] = [by(where, news[where]) if where in news else part for where, part in parts]
    return result


def has_placeholders(messages: Messages) -> bool:
    """Whether the messages say too little to tell prompts apart: the media that belong to them are elsewhere."""
    return any(part.get("type") in MODALITIES for _, part in places(messages, dict))


def with_parts(messages: Messages) -> list[dict[str, Any]]:
    """The messages with a MediaPart for each image and sound. Raises InvalidRequestError."""
    return replaced(messages, dict, _parsed)


def _parsed(where: str, part: dict[str, Any]) -> Any:
    kind = part.get("type")
    return media_part(part, where) if isinstance(kind, str) and kind in PART_TYPES else part


def check_taken(messages: Messages, features: Collection[str], engine: str) -> None:
    """Raises InvalidRequestError for the first MediaPart that an engine with these features does not take."""
    for where, part in places(messages, MediaPart):
        if part.kind not in features:
            raise InvalidRequestError(
                f"{where}: this model does not take {NOUNS[part.kind]} (the {engine} engine has no {part.kind!r}"
                " feature)",
                param=where,
                code="unsupported_content",
            )


def decoded(messages: Messages, limits: MediaSettings) -> list[dict[str, Any]]:
    """The messages with a Medium for each MediaPart. Raises InvalidRequestError.

    This takes time, and holds Python's lock for some of it. Together the images of a request have at most
    `max_image_pixels`, its sounds `max_audio_s`, so that what it takes in memory is bounded.
    """
    count = sum(1 for _ in places(messages, MediaPart))
    if count > limits.max_parts:
        text = f"messages: {count} images and sounds are too many (allowed: {limits.max_parts}, media.max_parts)"
        raise InvalidRequestError(text, param="messages")
    left = _Budget(limits.max_image_pixels, limits.max_audio_s)
    return replaced(messages, MediaPart, lambda where, part: _decode(part, where, limits, left))


def split(messages: Messages, of: type[K]) -> tuple[list[dict[str, Any]], list[K]]:
    """The messages with placeholders for the parts of this type, and those parts in order."""
    media: list[K] = []

    def placeholder(where: str, part: K) -> dict[str, Any]:
        media.append(part)
        return {"type": part.kind}

    return replaced(messages, of, placeholder), media


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
