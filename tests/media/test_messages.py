"""From content parts to decoded media beside a chat with placeholders."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.media.builders import audio, encoded, image_url, input_audio, pixels, png, text, user, wav
from weft.config.settings import MediaSettings
from weft.core.errors import InvalidRequestError
from weft.core.media import Medium
from weft.media.hashing import media_digest
from weft.media.messages import check_taken, decoded, places, split, with_parts
from weft.media.parts import MediaPart

CHAT = [
    {"role": "system", "content": "Look."},
    user(text("a"), image_url(png(1)), text("b"), audio([0.5])),
    {"role": "assistant", "content": None},
    user(image_url(png(2))),
]


def test_a_chat_goes_all_the_way() -> None:
    before = copy.deepcopy(CHAT)
    plain, media = split(decoded(with_parts(CHAT), MediaSettings()), Medium)
    assert before == CHAT
    assert plain == [
        CHAT[0],
        user(text("a"), {"type": "image"}, text("b"), {"type": "audio"}),
        CHAT[2],
        user({"type": "image"}),
    ]
    assert [medium.kind for medium in media] == ["image", "audio", "image"]
    assert (media[0].samples == pixels(seed=1)).all() and (media[2].samples == pixels(seed=2)).all()
    assert media[1].samples.tolist() == [0.5]
    assert [m.digest for m in media] == [media_digest(m.kind, m.samples) for m in media]


def test_places_name_every_part() -> None:
    assert [where for where, _ in places(with_parts(CHAT), MediaPart)] == [
        "messages[1].content[1]",
        "messages[1].content[3]",
        "messages[3].content[0]",
    ]


@pytest.mark.parametrize(
    ("features", "where", "what"),
    [
        ([], "messages[1].content[1]", "images (the demo engine has no 'image' feature)"),
        (["audio", "lora"], "messages[1].content[1]", "images (the demo engine has no 'image' feature)"),
        (["image"], "messages[1].content[3]", "sound (the demo engine has no 'audio' feature)"),
    ],
)
def test_what_an_engine_does_not_take_is_refused(features: list[str], where: str, what: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_taken(with_parts(CHAT), features, "demo")
    assert caught.value.message == f"{where}: this model does not take {what}"
    assert (caught.value.param, caught.value.code) == (where, "unsupported_content")


def test_what_an_engine_takes_is_not_refused() -> None:
    check_taken(with_parts(CHAT), {"image", "audio"}, "demo")


def refused(chat: list[dict], **limits: float) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(with_parts(chat), MediaSettings(**limits))
    return caught.value


def test_the_bytes_of_an_image_are_limited() -> None:
    data = encoded(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    decoded(with_parts([user(image_url(data))]), MediaSettings(max_image_bytes=len(data)))
    error = refused([user(text("a"), image_url(data))], max_image_bytes=len(data) - 1)
    assert error.param == "messages[0].content[1]" and "media.max_image_bytes" in error.message


def test_pixels_are_limited_over_all_images_of_a_request() -> None:
    chat = [user(image_url()), user(image_url())]
    decoded(with_parts(chat), MediaSettings(max_image_pixels=70))
    error = refused(chat, max_image_pixels=69)
    assert error.param == "messages[1].content[0]" and "media.max_image_pixels" in error.message


def test_seconds_are_limited_over_all_sounds_of_a_request() -> None:
    chat = [user(audio([0.0] * 8_000), input_audio(wav(bytes(8_000), rate=8_000)))]
    decoded(with_parts(chat), MediaSettings(max_audio_s=1.0))
    error = refused(chat, max_audio_s=0.99)
    assert error.param == "messages[0].content[1]" and "media.max_audio_s" in error.message


def test_the_number_of_media_is_limited() -> None:
    decoded(with_parts(CHAT), MediaSettings(max_parts=3))
    assert "media.max_parts" in refused(CHAT, max_parts=2).message


def test_low_detail_is_not_ignored() -> None:
    decoded(with_parts([user(image_url(detail="high"))]), MediaSettings())
    error = refused([user(image_url(detail="low"))])
    assert (error.param, error.code) == ("messages[0].content[0].image_url.detail", "unsupported_parameter")


def test_what_cannot_be_decoded_is_refused_at_its_place() -> None:
    error = refused([user(text("a"), image_url(png()[:60]))])
    assert error.param == "messages[0].content[1]" and "broken" in error.message
