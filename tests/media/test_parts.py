"""Which forms of content parts are well-formed, and where the others are at fault."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.media.builders import audio, encoded, image_url, input_audio, pcm, pixels, png, text64, wav
from weft.core.errors import InvalidRequestError
from weft.media.parts import PART_TYPES, MediaPart, media_part

PNG, WAV = png(), wav(b"\0\0")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (image_url(PNG), MediaPart("image", "png", PNG)),
        (image_url(PNG, detail="low"), MediaPart("image", "png", PNG, "low")),
        (image_url(PNG, detail=None), MediaPart("image", "png", PNG)),
        ({"type": "image", "data": text64(PNG)}, MediaPart("image", "png", PNG)),
        ({"type": "image", "data": text64(PNG), "format": "png"}, MediaPart("image", "png", PNG)),
        (input_audio(WAV), MediaPart("audio", "wav", WAV)),
        (input_audio(pcm([0.5]), "pcm_f32"), MediaPart("audio", "pcm_f32", pcm([0.5]))),
        (audio([0.5]), MediaPart("audio", "pcm_f32", pcm([0.5]))),
    ],
)
def test_all_forms_are_read(part: dict[str, Any], expected: MediaPart) -> None:
    assert media_part(part, "here") == expected


@pytest.mark.parametrize("form", ["png", "jpeg", "webp", "gif"])
def test_images_of_all_formats_are_known_by_their_first_bytes(form: str) -> None:
    data = encoded(pixels(), form)
    assert media_part(image_url(data, form), "here").format == form
    assert media_part({"type": "image", "data": text64(data)}, "here").format == form


def test_jpg_is_jpeg() -> None:
    data = encoded(pixels(), "jpeg")
    assert media_part(image_url(data, "jpg"), "here").format == "jpeg"


def url(text: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": text}}


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        (url("https://example.com/cat.png"), "here.image_url.url", "the server fetches nothing"),
        (url("http://127.0.0.1/"), "here.image_url.url", "the server fetches nothing"),
        (url("file:///etc/passwd"), "here.image_url.url", "the server fetches nothing"),
        (url(7), "here.image_url.url", "7 is not allowed"),
        (url("data:image/png,abc"), "here.image_url.url", "data:image/png;base64"),
        (url("data:image/png;base64"), "here.image_url.url", "data:image/png;base64"),
        (url("data:text/plain;base64,aGk="), "here.image_url.url", "data:image/png;base64"),
        (url("data:image/png;charset=x;base64,aGk="), "here.image_url.url", "data:image/png;base64"),
        (url("data:" + "x" * 200 + ",aGk="), "here.image_url.url", "data:image/png;base64"),
        (url("data:image/tiff;base64,aGk="), "here.image_url.url", "png, jpeg, webp, gif"),
        (url("data:image/png;base64,"), "here.image_url.url", "base64 text"),
        (url("data:image/png;base64,a"), "here.image_url.url", "not valid base64"),
        (url("data:image/png;base64,aG\nk="), "here.image_url.url", "not valid base64"),
        (url("data:image/png;base64,é==="), "here.image_url.url", "not valid base64"),
        (url("data:image/png;base64,aGk="), "here.image_url.url", "no PNG, JPEG, WebP or GIF"),
        (image_url(PNG, "gif"), "here.image_url.url", "it says gif, but the image is png"),
        (image_url(PNG, detail="huge"), "here.image_url.detail", "auto, low, high"),
        (image_url(PNG, size=3), "here.image_url.size", "not a field"),
        (image_url(PNG) | {"cache": 1}, "here.cache", "not a field"),
        ({"type": "image_url"}, "here.image_url", "an object"),
        ({"type": "image_url", "image_url": "data:"}, "here.image_url", "an object"),
        ({"type": "image"}, "here.data", "base64 text"),
        ({"type": "image", "data": text64(PNG), "format": "tiff"}, "here.format", "png, jpeg"),
        ({"type": "image", "data": text64(PNG), "format": ["png"]}, "here.format", "png, jpeg"),
        ({"type": "image", "data": text64(PNG), "format": "webp"}, "here.format", "the image is png"),
        ({"type": "image", "data": text64(PNG), "url": "x"}, "here.url", "not a field"),
        (input_audio(WAV, "mp3"), "here.input_audio.format", "wav, pcm_f32"),
        ({"type": "input_audio", "input_audio": {"data": text64(WAV)}}, "here.input_audio.format", "wav, pcm_f32"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "here.input_audio.data", "base64 text"),
        (input_audio(PNG), "here.input_audio.data", "no WAV file"),
        (input_audio(b"abc", "pcm_f32"), "here.input_audio.data", "3 bytes are no whole number"),
        ({"type": "input_audio", "input_audio": []}, "here.input_audio", "an object"),
        ({"type": "audio", "data": text64(b"abcde")}, "here.data", "5 bytes are no whole number"),
        ({"type": "audio", "data": b"abcd"}, "here.data", "base64 text"),
        ({"type": "audio", "data": text64(b"abcd"), "format": "wav"}, "here.format", "not a field"),
        ({"type": "audio", "data": text64(b"abcd"), "x" * 500: 1}, None, "not a field"),
    ],
)
def test_what_is_not_well_formed_is_refused_at_its_place(part: dict[str, Any], param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        media_part(part, "here")
    assert says in caught.value.message and len(caught.value.message) < 300
    assert param is None or (caught.value.param == param and caught.value.message.startswith(param))


VALUES = (
    st.none()
    | st.integers()
    | st.text(max_size=20)
    | st.binary(max_size=20).map(lambda b: base64.b64encode(b).decode())
)
FIELDS = st.sampled_from(["data", "format", "image_url", "input_audio", "url", "detail"])


@given(
    st.sampled_from(sorted(PART_TYPES)),
    st.dictionaries(FIELDS, VALUES | st.dictionaries(FIELDS, VALUES) | st.lists(VALUES, max_size=2)),
)
def test_whatever_the_fields_are_only_our_error_comes_out(kind: str, fields: dict[str, Any]) -> None:
    try:
        part = media_part(fields | {"type": kind}, "here")
    except InvalidRequestError as error:
        assert error.param is not None and error.param.startswith("here")
    else:
        assert part.kind == PART_TYPES[kind]
