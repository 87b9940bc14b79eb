"""Encoded images to pixels, through Pillow, which is loaded for the first image.

Sizes are read from headers and judged before any pixel is decoded. Each format has its own decoder and no other is
tried. Whatever a decoder raises means that the image is broken, for its bytes are a stranger's.
"""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weft.core.errors import InvalidRequestError, SettingsError

if TYPE_CHECKING:
    from PIL.Image import Image

UInt8s = npt.NDArray[np.uint8]

MAX_SIDE = 16_384
"""Longest side of an image, in pixels."""


def check_installed() -> None:
    """Raises SettingsError where images cannot be decoded, naming the extra."""
    if importlib.util.find_spec("PIL") is None:
        raise SettingsError("images need Pillow, which is not installed (pip install 'weft[media]')")


def decode_image(data: bytes, form: str, where: str, max_pixels: int) -> UInt8s:
    """The first frame of a png, jpeg, webp or gif: uint8 [height, width, 3], RGB.

    Turned as its EXIF orientation says; what is transparent is over white; 16 bits a channel become 8. Raises
    InvalidRequestError at `where` for what is too large, broken or cut short.
    """
    check_installed()
    import PIL.Image

    if form == "webp":  # Pillow's reader makes room for all pixels as soon as it opens the file
        _check_size(_webp_size(data, where), where, max_pixels)
    try:
        with PIL.Image.open(io.BytesIO(data), formats=[form]) as image:
            _check_size(image.size, where, max_pixels)
            image.load()
            return _pixels(image)
    except InvalidRequestError:
        raise
    except PIL.Image.DecompressionBombError:
        raise _too_large("it", where, max_pixels) from None
    except Exception as error:
        text = f"{where}: the {form} image is broken: {type(error).__name__}: {str(error)[:200]}"
        raise InvalidRequestError(text, param=where) from None


def _pixels(image: Image) -> UInt8s:
    import PIL.Image
    import PIL.ImageOps

    upright = PIL.ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits of grey, which `convert` would clip
        grey = np.clip(np.asarray(upright).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if upright.has_transparency_data:
        transparent = upright.convert("RGBA")
        upright = PIL.Image.new("RGB", transparent.size, "white")
        upright.paste(transparent, mask=transparent.getchannel("A"))
    return np.array(upright.convert("RGB"), dtype=np.uint8)


def _check_size(size: tuple[int, int], where: str, max_pixels: int) -> None:
    width, height = size
    if max(size) > MAX_SIDE or width * height > max_pixels:
        raise _too_large(f"{width} × {height} pixels", where, max_pixels)


def _too_large(what: str, where: str, max_pixels: int) -> InvalidRequestError:
    text = (
        f"{where}: {what} is too large (allowed: sides of {MAX_SIDE} and {max_pixels} pixels in all images of a"
        " request, the setting media.max_image_pixels)"
    )
    return InvalidRequestError(text, param=where)


def _webp_size(data: bytes, where: str) -> tuple[int, int]:
    """Width and height of the canvas, from the first chunk (RFC 9649)."""
    head, kind = data[20:30], data[12:16]
    if len(head) == 10 and kind == b"VP8X":
        return int.from_bytes(head[4:7], "little") + 1, int.from_bytes(head[7:10], "little") + 1
    if len(head) == 10 and kind == b"VP8L" and head[0] == 0x2F:
        bits = int.from_bytes(head[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if len(head) == 10 and kind == b"VP8 " and head[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF
    raise InvalidRequestError(f"{where}: the webp image is broken: its header has no size", param=where)
