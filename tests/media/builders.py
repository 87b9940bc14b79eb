"""Small images and sounds, encoded, and content parts that hold them."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import numpy as np
import PIL.Image


def pixels(width: int = 7, height: int = 5, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3], all different."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: np.ndarray | PIL.Image.Image, form: str = "png", **options: Any) -> bytes:
    if isinstance(image, np.ndarray):
        image = PIL.Image.fromarray(image)
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def png(seed: int = 0) -> bytes:
    return encoded(pixels(seed=seed))


def wav(data: bytes, *, tag: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16, **changes: Any) -> bytes:
    """`changes`: `length` of the data chunk, `frame_bytes`, `fmt` (a chunk), `before` (chunks before the data)."""
    frame_bytes = changes.get("frame_bytes", channels * bits // 8)
    fmt = changes.get("fmt", struct.pack("<HHIIHH", tag, channels, rate, rate * frame_bytes, frame_bytes, bits))
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + changes.get("before", b"")
    body += b"data" + struct.pack("<I", changes.get("length", len(data))) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def pcm(values: list[float] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image_url(data: bytes | None = None, form: str = "png", **fields: Any) -> dict[str, Any]:
    url = f"data:image/{form};base64,{text64(png() if data is None else data)}"
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def audio(values: list[float] | np.ndarray = (0.5, -0.5)) -> dict[str, Any]:  # type: ignore[assignment]
    return {"type": "audio", "data": text64(pcm(values))}


def input_audio(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": text64(data), "format": form}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}
