"""Content parts of chat messages that are no text: their forms, checked without decoding what they hold.

Invariant: a `MediaPart` was well-formed: its base64 was valid, and its first bytes are those of its format. What it
decodes to is `images`' and `audio`'s to find out. Errors are InvalidRequestError and name the place.
"""

from __future__ import annotations

import binascii
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from weft.core.errors import InvalidRequestError
from weft.core.media import Modality

PART_TYPES: dict[str, Modality] = {"image_url": "image", "image": "image", "input_audio": "audio", "audio": "audio"}
IMAGE_FORMATS = ("png", "jpeg", "webp", "gif")
AUDIO_FORMATS = ("wav", "pcm_f32")
DETAILS = ("auto", "low", "high")

_MAX_HEADER_CHARS = 100  # of a data: URL before its comma
_ALIASES = {"jpg": "jpeg"}
_NO_FETCHING = "a data: URL such as data:image/png;base64,…; the server fetches nothing from elsewhere"


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image or sound as it came: `data` in `format`, one of IMAGE_FORMATS or AUDIO_FORMATS.

    `pcm_f32` is little-endian float32, mono, 16,000 samples a second. `detail` is of images.
    """

    kind: Modality
    format: str
    data: bytes = field(repr=False)
    detail: Literal["auto", "low", "high"] = "auto"


def media_part(part: Mapping[str, Any], where: str) -> MediaPart:
    """A part whose `type` is in PART_TYPES. Raises InvalidRequestError, at `where` or below it."""
    match part["type"]:
        case "image_url":
            return _image_url(_inner(part, "image_url", where), f"{where}.image_url")
        case "image":
            _check_fields(part, ("type", "data", "format"), where)
            return _image(part.get("data"), part.get("format"), f"{where}.data", f"{where}.format")
        case "input_audio":
            inner, place = _inner(part, "input_audio", where), f"{where}.input_audio"
            _check_fields(inner, ("data", "format"), place)
            return _audio(inner.get("data"), inner.get("format"), f"{place}.data", f"{place}.format")
        case _:
            _check_fields(part, ("type", "data"), where)
            return _audio(part.get("data"), "pcm_f32", f"{where}.data", where)


def _image_url(fields: Mapping[str, Any], where: str) -> MediaPart:
    _check_fields(fields, ("url", "detail"), where)
    url, detail = fields.get("url"), fields.get("detail")
    if detail is not None and detail not in DETAILS:
        _refuse(f"{where}.detail", detail, ", ".join(DETAILS))
    if not isinstance(url, str) or url[:5].lower() != "data:":
        _refuse(f"{where}.url", url, _NO_FETCHING)
    comma = url.find(",", 0, _MAX_HEADER_CHARS)
    header = url[5:comma].lower() if comma > 0 else ""
    media_type, _, encoding = header.partition(";")
    if comma < 0 or encoding != "base64" or not media_type.startswith("image/"):
        allowed = ", ".join(f"data:image/{name};base64,…" for name in IMAGE_FORMATS)
        _refuse(f"{where}.url", url[:_MAX_HEADER_CHARS], allowed)
    return _image(url[comma + 1 :], media_type[6:], f"{where}.url", f"{where}.url", detail or "auto")


def _image(data: Any, form: Any, where: str, where_format: str, detail: Any = "auto") -> MediaPart:
    """`form` None: whatever it is."""
    form = _ALIASES.get(form, form) if isinstance(form, str) else form
    if form is not None and form not in IMAGE_FORMATS:
        _refuse(where_format, form, ", ".join(IMAGE_FORMATS))
    encoded = _decoded(data, where)
    found = _image_format(encoded)
    if found is None:
        raise InvalidRequestError(f"{where}: this is no PNG, JPEG, WebP or GIF image", param=where)
    if form not in (None, found):
        raise InvalidRequestError(f"{where_format}: it says {form}, but the image is {found}", param=where_format)
    return MediaPart("image", found, encoded, detail)


def _image_format(data: bytes) -> str | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _audio(data: Any, form: Any, where: str, where_format: str) -> MediaPart:
    if form not in AUDIO_FORMATS:
        _refuse(where_format, form, ", ".join(AUDIO_FORMATS))
    encoded = _decoded(data, where)
    if form == "wav" and (encoded[:4] != b"RIFF" or encoded[8:12] != b"WAVE"):
        raise InvalidRequestError(f"{where}: this is no WAV file", param=where)
    if form == "pcm_f32" and len(encoded) % 4:
        text = f"{where}: {len(encoded)} bytes are no whole number of float32 samples"
        raise InvalidRequestError(text, param=where)
    return MediaPart("audio", form, encoded)


def _decoded(data: Any, where: str) -> bytes:
    """The bytes of base64 text; nothing but its alphabet and its padding is allowed."""
    if not isinstance(data, str) or not data:
        _refuse(where, data, "base64 text")
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error is one; so is what is not ASCII
        raise InvalidRequestError(f"{where}: this is not valid base64: {error}", param=where) from None


def _inner(part: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    _check_fields(part, ("type", name), where)
    inner = part.get(name)
    if not isinstance(inner, dict):
        _refuse(f"{where}.{name}", inner, "an object")
    return inner


def _check_fields(fields: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in fields:
        if name not in known:
            shown = name if len(name) <= 60 else name[:60] + "…"
            text = f"{where}.{shown}: not a field of this part (allowed: {', '.join(known)})"
            raise InvalidRequestError(text, param=f"{where}.{shown}")


def _refuse(where: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequestError(f"{where}: {reprlib.repr(value)} is not allowed (allowed: {allowed})", param=where)
