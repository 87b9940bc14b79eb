"""eSpeak NG, over the shared library that the package `espeakng-loader` brings.

The library keeps what it is doing in global variables, some of which nothing resets: the same text would sound a little
different every time. So it is loaded anew for every clause (about 5 ms), under one lock for the whole process.
"""

from __future__ import annotations

import _ctypes
import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from weft.core.errors import EngineError
from weft.core.plan import Float32s
from weft.speech.base import AUTO, Facts

ENGLISH, CHINESE = "en-us", "cmn"
WORDS_PER_MINUTE = 175  # at speed 1
SLOWEST = 0.5  # the library goes no lower than 80 words per minute

_SAMPLE_RATE = 22_050
_SYNCHRONOUS = 2  # espeak_Synth returns when all has been said
_DONT_EXIT = 0x8000  # without it, a missing data file would end this process
_UTF8 = 1
_RATE = 1
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_LOCK = threading.Lock()
_OnAudio = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class _Voice(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("languages", ctypes.c_void_p),  # of each a byte of priority and a string; then a zero
        ("identifier", ctypes.c_char_p),
        ("gender", ctypes.c_ubyte),
        ("age", ctypes.c_ubyte),
        ("variant", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte),
        ("score", ctypes.c_int),
        ("spare", ctypes.c_void_p),
    ]


class EspeakSynthesizer:
    """Speech by rules in a hundred languages: small, fast, and plainly a machine's.

    Voices are languages ("en-us", "cmn"), or the library's own names of them ("English (America)"). "auto" is Mandarin
    for a clause with Chinese characters, else American English.
    """

    def __init__(self) -> None:
        """Raises ImportError where `espeakng-loader` is missing, EngineError where its library cannot be used."""
        import espeakng_loader

        self._library = str(espeakng_loader.get_library_path())
        self._data = str(espeakng_loader.get_data_path()).encode()
        voices = self._list_voices()
        self._identifiers = _by_name(voices)
        languages = sorted({languages[0] for _, languages, _ in voices})
        self.facts = Facts("espeak", _SAMPLE_RATE, (SLOWEST, 4.0), (AUTO, *languages), tuple(self._identifiers))

    def speak(self, text: str, voice: str, speed: float, reference: Float32s | None = None) -> Float32s:
        """float32 [samples] at 22,050 per second. Raises EngineError."""
        if voice.lower() == AUTO:
            voice = CHINESE if _HAN.search(text) else ENGLISH
        pieces: list[bytes] = []

        def on_audio(samples: int | None, count: int, events: int) -> int:
            if samples and count > 0:
                pieces.append(ctypes.string_at(samples, 2 * count))
            return 0

        data = text.replace("\0", " ").encode("utf-8", "replace") + b"\0"
        callback = _OnAudio(on_audio)
        with self._loaded() as library:
            library.espeak_SetSynthCallback(callback)
            if library.espeak_SetVoiceByName(self._identifiers[voice.lower()]):
                raise EngineError(f"espeak cannot load the voice {voice!r}", code="speech_failed")
            library.espeak_SetParameter(_RATE, round(WORDS_PER_MINUTE * speed), 0)
            size = ctypes.c_size_t(len(data))
            if library.espeak_Synth(data, size, 0, 0, 0, _UTF8, None, None):
                raise EngineError("espeak could not speak this text", code="speech_failed")
        return np.frombuffer(b"".join(pieces), np.int16).astype(np.float32) / np.float32(32768)

    def close(self) -> None:
        """A clause is said to its end."""

    @contextmanager
    def _loaded(self) -> Iterator[ctypes.CDLL]:
        """The library, ready to speak and as fresh as in a new process. Raises EngineError."""
        with _LOCK:
            try:
                library = ctypes.CDLL(self._library)
            except OSError as error:
                raise EngineError(f"espeak's library cannot be loaded: {error}", code="speech_failed") from None
            try:
                rate = library.espeak_Initialize(_SYNCHRONOUS, 0, self._data, _DONT_EXIT)
                if rate != _SAMPLE_RATE:
                    text = f"espeak cannot use its data in {self._data.decode()} (it answers {rate})"
                    raise EngineError(text, code="speech_failed")
                try:
                    yield library
                finally:
                    library.espeak_Terminate()
            finally:
                _ctypes.dlclose(library._handle)

    def _list_voices(self) -> list[tuple[str, list[str], bytes]]:
        """Name, languages and identifier of each. Raises EngineError."""
        with self._loaded() as library:
            library.espeak_ListVoices.restype = ctypes.POINTER(ctypes.POINTER(_Voice))
            listed = library.espeak_ListVoices(None)
            result: list[tuple[str, list[str], bytes]] = []
            while listed[len(result)]:
                voice = listed[len(result)].contents
                result.append((voice.name.decode(), _languages(voice.languages), bytes(voice.identifier)))
        return result


def _by_name(voices: list[tuple[str, list[str], bytes]]) -> dict[str, bytes]:
    """Identifiers by name and by language, in lower case; of several voices of a language, the one listed first."""
    result: dict[str, bytes] = {}
    for name, languages, identifier in voices:
        for key in (languages[0], name):
            result.setdefault(key.lower(), identifier)
    for _, languages, identifier in voices:  # "en", "zh": behind everybody's own
        for key in languages[1:]:
            result.setdefault(key.lower(), identifier)
    return result


def _languages(address: int) -> list[str]:
    result = []
    while ctypes.string_at(address, 1) != b"\0":
        language = ctypes.string_at(address + 1)
        result.append(language.decode())
        address += 2 + len(language)
    return result
