"""WAV files and bare samples to sound: float32 [samples], mono, 16,000 a second, about -1 to 1.

The WAV reader is our own: the standard library's knows no float samples, and trusts what headers say of lengths.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import gcd

import numpy as np

from weft.core.errors import InvalidRequestError
from weft.core.plan import Float32s
from weft.media.resample import resampled

SAMPLE_RATE = 16_000
LOWEST_RATE, HIGHEST_RATE = 8_000, 192_000
MAX_CHANNELS = 8
MAX_LEVEL = 8.0
"""Samples beyond are no sound but a mistake, such as integers sent as floats."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_END = bytes.fromhex("000000001000800000aa00389b71")  # of the formats that have a number, too
_STREAM = 0xFFFFFFFF  # the length of data that was not known when its header was written
_COARSEST = 10  # a filter's phases are 16000 / gcd: with a lower divisor there would be thousands


@dataclass(frozen=True, slots=True)
class _Format:
    tag: int
    channels: int
    rate: int
    bits: int

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.bits // 8


def decode_audio(data: bytes, form: str, where: str, max_s: float) -> Float32s:
    """`data` in `form` ("wav" or "pcm_f32") as float32 [n] at 16 kHz, n at least 1.

    Channels are averaged. Raises InvalidRequestError at `where` for what is too long, broken or cut short.
    """
    if form == "pcm_f32":
        _check_length(len(data) // 4, SAMPLE_RATE, where, max_s)
        return _checked(np.frombuffer(data, dtype="<f4").astype(np.float32), where)
    wav, samples = _read_wav(data, where)
    frames = len(samples) // wav.frame_bytes
    _check_length(frames, wav.rate, where, max_s)
    values = _checked(_to_floats(wav, samples), where)
    mono = values.reshape(frames, wav.channels).mean(axis=1, dtype=np.float32)
    return np.ascontiguousarray(resampled(mono, wav.rate, SAMPLE_RATE), dtype=np.float32)


def _read_wav(data: bytes, where: str) -> tuple[_Format, memoryview]:
    """The format and the bytes of the samples, whole frames of them."""
    wav: _Format | None = None
    at = 12
    while at + 8 <= len(data):
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8
        if name == b"data" and wav is not None:
            return wav, _samples(memoryview(data)[at:], length, wav, where)
        if name == b"data":
            break
        if name == b"fmt ":
            wav = _read_format(data[at : at + min(length, 40)], where)
        at += length + length % 2
    raise _broken(where, "there is no data chunk" if wav is not None else "there is no fmt chunk before its data")


def _read_format(chunk: bytes, where: str) -> _Format:
    if len(chunk) < 16:
        raise _broken(where, "its fmt chunk is cut short")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and len(chunk) == 40 and chunk[26:40] == _GUID_END:
        tag = int.from_bytes(chunk[24:26], "little")
    if (tag, bits) not in ((_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32)):
        text = f"{where}: WAV format {tag:#06x} with {bits} bits is not allowed (allowed: PCM 8, 16, 24, 32, float 32)"
        raise InvalidRequestError(text, param=where)
    if not 1 <= channels <= MAX_CHANNELS:
        text = f"{where}: {channels} channels are not allowed (allowed: 1 to {MAX_CHANNELS})"
        raise InvalidRequestError(text, param=where)
    if not LOWEST_RATE <= rate <= HIGHEST_RATE or gcd(rate, SAMPLE_RATE) < _COARSEST:
        allowed = f"{LOWEST_RATE} to {HIGHEST_RATE}, a multiple of 10, 16 or 25"
        text = f"{where}: {rate} samples a second are not allowed (allowed: {allowed})"
        raise InvalidRequestError(text, param=where)
    wav = _Format(tag, channels, rate, bits)
    if frame_bytes != wav.frame_bytes:
        raise _broken(where, f"it has {frame_bytes} bytes a frame where {wav.frame_bytes} are needed")
    return wav


def _samples(rest: memoryview, length: int, wav: _Format, where: str) -> memoryview:
    if length == _STREAM:
        return rest[: len(rest) - len(rest) % wav.frame_bytes]
    if length > len(rest):
        raise _broken(where, f"it has {len(rest)} of {length} bytes of samples")
    if length % wav.frame_bytes:
        raise _broken(where, f"{length} bytes of samples are no whole number of frames")
    return rest[:length]


def _to_floats(wav: _Format, samples: memoryview) -> Float32s:
    """float32 [frames * channels]; full scale is 1."""
    if wav.tag == _FLOAT:
        return np.frombuffer(samples, dtype="<f4").astype(np.float32)
    if wav.bits == 8:
        return (np.frombuffer(samples, dtype=np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if wav.bits == 24:
        parts = np.frombuffer(samples, dtype=np.uint8).reshape(-1, 3).astype(np.int32)
        return ((parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) / 2**31).astype(np.float32)
    integers = np.frombuffer(samples, dtype=f"<i{wav.bits // 8}")
    return (integers.astype(np.float32) / np.float32(2 ** (wav.bits - 1))).astype(np.float32)


def _check_length(frames: int, rate: int, where: str, max_s: float) -> None:
    if frames == 0:
        raise InvalidRequestError(f"{where}: there are no samples", param=where)
    if frames > max_s * rate:
        text = (
            f"{where}: {frames / rate:.1f} s of sound are too long (allowed: {max_s:g} s in all sounds of a request,"
            " the setting media.max_audio_s)"
        )
        raise InvalidRequestError(text, param=where)


def _checked(values: Float32s, where: str) -> Float32s:
    low, high = float(values.min()), float(values.max())  # NaN, if any sample is
    if not max(-low, high) <= MAX_LEVEL:
        text = f"{where}: samples must be finite and about -1 to 1, these go from {low:g} to {high:g}"
        raise InvalidRequestError(text, param=where)
    return values


def _broken(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: the WAV file is broken: {what}", param=where)
