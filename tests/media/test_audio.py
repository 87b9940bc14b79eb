"""WAV files and bare samples become 16 kHz mono; whatever is wrong with them is the client's error."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.media.builders import pcm, wav
from weft.core.errors import InvalidRequestError
from weft.media.audio import MAX_LEVEL, SAMPLE_RATE, decode_audio


def decode(data: bytes, form: str = "wav", max_s: float = 600.0) -> np.ndarray:
    return decode_audio(data, form, "here", max_s)


def refused(data: bytes, form: str = "wav", max_s: float = 600.0) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, form, max_s)
    assert caught.value.param == "here" and caught.value.message.startswith("here: ")
    return caught.value.message


def packed(values: list[float], bits: int) -> bytes:
    if bits == 8:
        return bytes(int(v * 128) + 128 for v in values)
    return b"".join(int(v * 2 ** (bits - 1)).to_bytes(bits // 8, "little", signed=True) for v in values)


VALUES = [0.0, 0.5, -0.5, -1.0, 0.25]


def test_bare_samples_come_out_as_they_were() -> None:
    result = decode(pcm(VALUES), "pcm_f32")
    assert result.dtype == np.float32 and result.tolist() == VALUES


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_integers_of_all_sizes_reach_from_minus_one_to_one(bits: int) -> None:
    assert decode(wav(packed(VALUES, bits), bits=bits)).tolist() == VALUES


def test_floats_come_out_as_they_were() -> None:
    assert decode(wav(pcm(VALUES), tag=3, bits=32)).tolist() == VALUES


def test_the_extensible_form_is_understood() -> None:
    fmt = struct.pack("<HHIIHHHHI", 0xFFFE, 1, SAMPLE_RATE, 64_000, 4, 32, 22, 32, 4)
    fmt += bytes.fromhex("0300" + "000000001000800000aa00389b71")
    assert decode(wav(pcm(VALUES), bits=32, fmt=fmt)).tolist() == VALUES
    refused(wav(pcm(VALUES), bits=32, fmt=fmt[:-1] + b"\0"))


def test_channels_are_averaged() -> None:
    assert decode(wav(packed([0.5, -0.5, 0.5, 0.25], 16), channels=2)).tolist() == [0.0, 0.375]


def test_other_chunks_are_passed_over() -> None:
    before = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fact" + struct.pack("<I", 4) + b"\0\0\0\0"
    assert decode(wav(packed(VALUES, 16), before=before)).tolist() == VALUES


def test_a_stream_ends_where_the_file_does() -> None:
    data = wav(packed(VALUES, 16), length=0xFFFFFFFF)
    assert decode(data).tolist() == VALUES
    assert decode(data + b"x").tolist() == VALUES


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_the_rate_becomes_16_khz_and_a_tone_stays(rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate) / 2
    result = decode(wav(packed(tone.tolist(), 16), rate=rate))
    assert len(result) == 8_000
    expected = np.sin(2 * np.pi * 440 * np.arange(8_000) / SAMPLE_RATE) / 2
    assert np.abs(result - expected)[200:-200].max() < 0.01


@pytest.mark.parametrize("rate", [0, 7_999, 7_990, 192_010, 44_101, 2**32 - 1])
def test_other_rates_are_refused(rate: int) -> None:
    assert "8000 to 192000, a multiple of 10, 16 or 25" in refused(
        wav(packed(VALUES, 16), fmt=struct.pack("<HHIIHH", 1, 1, rate, 0, 2, 16))
    )


def test_what_is_too_long_is_refused() -> None:
    assert len(decode(pcm([0.0] * 16_000), "pcm_f32", 1.0)) == 16_000
    assert "media.max_audio_s" in refused(pcm([0.0] * 16_001), "pcm_f32", 1.0)
    assert "1.5 s" in refused(wav(bytes(2 * 12_000), rate=8_000), max_s=1.25)
    assert len(decode(wav(bytes(2 * 8_000), rate=8_000), max_s=1.0)) == 16_000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, MAX_LEVEL * 1.01, -32768.0])
def test_samples_must_be_sound(value: float) -> None:
    for place in (0, 1, 2):
        values = [0.0, 0.1, 0.2]
        values[place] = value
        assert "about -1 to 1" in refused(pcm(values), "pcm_f32")
        assert "about -1 to 1" in refused(wav(pcm(values), tag=3, bits=32))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"RIFF\0\0\0\0WAVE", "no fmt chunk"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "no fmt chunk"),
        (wav(b"")[:36], "no data chunk"),
        (wav(b""), "no samples"),
        (wav(b"\0\0\0"), "no whole number of frames"),
        (wav(b"\0\0", length=4), "2 of 4 bytes"),
        (wav(b"\0\0", fmt=b"\1\0\1\0"), "fmt chunk is cut short"),
        (wav(b"\0\0", frame_bytes=4), "4 bytes a frame"),
        (wav(b"\0\0", tag=2, bits=4), "format 0x0002 with 4 bits"),
        (wav(b"\0" * 8, tag=3, bits=64), "format 0x0003 with 64 bits"),
        (wav(b"\0\0", channels=9), "9 channels"),
        (wav(b"\0\0", fmt=struct.pack("<HHIIHH", 1, 0, 16_000, 0, 0, 16)), "0 channels"),
    ],
)
def test_broken_files_are_refused_with_what_is_wrong(data: bytes, says: str) -> None:
    assert says in refused(data)


def test_no_bare_samples_are_refused() -> None:
    assert "no samples" in refused(b"", "pcm_f32")


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_sound(data: bytes) -> None:
    check(b"RIFF\0\0\0\0WAVE" + data, "wav")
    check(data[: len(data) // 4 * 4], "pcm_f32")


@given(st.data())
def test_damaged_files_are_refused_or_sound(data: st.DataObject) -> None:
    damaged = bytearray(wav(packed(VALUES * 5, 16)))
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(12, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(damaged[: data.draw(st.integers(12, len(damaged)))]), "wav")


def check(data: bytes, form: str) -> None:
    try:
        result = decode(data, form, 1.0)
    except InvalidRequestError as error:
        assert error.message.startswith("here: ")
    else:
        assert result.dtype == np.float32 and result.ndim == 1 and 0 < len(result) <= 16_001
        assert np.isfinite(result).all()
