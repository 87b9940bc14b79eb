"""Images become pixels, within limits; whatever is wrong with them is the client's error."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.media.builders import encoded, pixels
from weft.core.errors import InvalidRequestError, SettingsError
from weft.media import images
from weft.media.images import MAX_SIDE, decode_image

MANY = 2**24
FORMS = ("png", "jpeg", "webp", "gif")


def decode(data: bytes, form: str = "png", max_pixels: int = MANY) -> np.ndarray:
    return decode_image(data, form, "here", max_pixels)


def refused(data: bytes, form: str = "png", max_pixels: int = MANY) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, form, max_pixels)
    assert caught.value.param == "here" and caught.value.message.startswith("here: ")
    return caught.value.message


def smooth(width: int = 64, height: int = 48) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns * 255 // width, rows * 255 // height, 128 + 0 * rows], axis=2).astype(np.uint8)


@pytest.mark.parametrize(("form", "options"), [("png", {}), ("webp", {"lossless": True})])
def test_lossless_images_come_out_as_they_were(form: str, options: dict[str, Any]) -> None:
    result = decode(encoded(pixels(), form, **options), form)
    assert result.dtype == np.uint8 and result.flags.c_contiguous
    assert (result == pixels()).all()


@pytest.mark.parametrize("form", ["jpeg", "webp", "gif"])
def test_lossy_images_come_out_much_the_same(form: str) -> None:
    result = decode(encoded(smooth(), form), form)
    assert result.shape == smooth().shape
    assert np.abs(result.astype(int) - smooth()).mean() < 12


def test_what_is_transparent_is_over_white() -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = (200, 0, 0, 255)
    rgba[0, 1] = (200, 0, 0, 0)
    rgba[1, 0] = (0, 0, 0, 51)
    result = decode(encoded(rgba))
    assert result[0, 0].tolist() == [200, 0, 0]
    assert result[0, 1].tolist() == [255, 255, 255]
    assert result[1, 0].tolist() == [204, 204, 204]


def test_a_transparent_colour_of_a_palette_is_over_white() -> None:
    image = PIL.Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    for form in ("gif", "png"):
        assert decode(encoded(image, form, transparency=1), form).tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    form = "jpeg" if mode in ("CMYK", "YCbCr") else "png"
    image = PIL.Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).convert(mode)
    assert (decode(encoded(image, form), form) > 250).all()


def test_sixteen_bits_of_grey_become_eight() -> None:
    grey = np.array([[0, 256, 0x8000, 0xFFFF]], dtype=np.uint16)
    assert decode(encoded(PIL.Image.fromarray(grey)))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_images_stand_upright() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned: its first row is shown as the right column
    result = decode(encoded(pixels(), exif=exif))
    assert (result == np.rot90(pixels(), -1)).all() and result.flags.c_contiguous


@pytest.mark.parametrize("form", ["gif", "webp", "png"])
def test_of_a_film_the_first_frame_is_taken(form: str) -> None:
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "webp" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert (decode(data, form) == [255, 0, 0]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_what_is_cut_short_is_refused(form: str, share: float) -> None:
    data = encoded(pixels(64, 64), form)
    refused(data[: int(len(data) * share)], form)


@pytest.mark.parametrize("form", FORMS)
def test_only_the_format_that_was_told_is_tried(form: str) -> None:
    other = FORMS[(FORMS.index(form) + 1) % len(FORMS)]
    refused(encoded(pixels(), other), form)


@pytest.mark.parametrize("form", FORMS)
def test_too_many_pixels_are_refused(form: str) -> None:
    data = encoded(pixels(20, 10), form)
    assert decode(data, form, 200).shape == (10, 20, 3)
    text = refused(data, form, 199)
    assert "20 × 10 pixels" in text and "199 pixels" in text and "media.max_image_pixels" in text


@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_too_long_sides_are_refused(form: str) -> None:
    image = PIL.Image.new("L", (MAX_SIDE + 1, 1))
    assert str(MAX_SIDE) in refused(encoded(image, form), form)
    assert decode(encoded(PIL.Image.new("L", (MAX_SIDE, 1)), form), form).shape == (1, MAX_SIDE, 3)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(form: str, width: int, height: int) -> bytes:
    """A small file that says that it is so large."""
    if form == "png":
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(bytes(1000)))
    if form == "gif":
        return b"GIF89a" + struct.pack("<HH", width, height) + encoded(PIL.Image.new("P", (1, 1)), "gif")[10:]
    if form == "jpeg":
        data = bytearray(encoded(PIL.Image.new("RGB", (8, 8)), "jpeg"))
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", height, width)
        return bytes(data)
    flags = b"\x02\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", len(flags)) + flags
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [5_000, 16_383, 65_535])
def test_bombs_are_refused_by_their_header(form: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bomb(form, side, side)
    assert len(data) < 3000

    def load(*_: object) -> None:
        pytest.fail("a bomb was decoded")

    monkeypatch.setattr(PIL.Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    assert "is too large" in refused(data, form)


def test_a_large_webp_is_refused_before_pillow_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: pytest.fail("opened"))
    big = PIL.Image.new("RGB", (300, 200))
    for options in ({"lossless": True}, {"lossless": False}):
        out = io.BytesIO()
        big.save(out, "webp", **options)
        assert "300 × 200" in refused(out.getvalue(), "webp", 59_999)


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"weft\[media\]"):
        decode(encoded(pixels()))


STARTS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF89a", "webp": b"RIFF\xff\0\0\0WEBP"}


@given(st.sampled_from(FORMS), st.binary(max_size=300))
def test_garbage_is_refused_or_an_image(form: str, data: bytes) -> None:
    check(STARTS[form] + data, form)


@given(st.data(), st.sampled_from(FORMS))
def test_damaged_images_are_refused_or_images(data: st.DataObject, form: str) -> None:
    damaged = bytearray(encoded(pixels(16, 16), form))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(len(STARTS[form]), len(damaged) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(damaged[: data.draw(st.integers(len(STARTS[form]), len(damaged)))]), form)


def check(data: bytes, form: str) -> None:
    try:
        result = decode(data, form, 10_000)
    except InvalidRequestError as error:
        assert error.message.startswith("here: ")
    else:
        assert result.dtype == np.uint8 and result.ndim == 3 and result.shape[2] == 3
        assert 0 < result.shape[0] * result.shape[1] <= 10_000
