"""A user's own Piper voice: a VITS network in ONNX form, with its settings in the .onnx.json beside it.

The package `piper-tts` does the work: the text's phonemes (with an eSpeak NG of its own), their ids, and the network on
onnxruntime. Nothing here reaches for the network: voices whose phonemes need a model that would have to be fetched are
refused.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from weft.core.errors import EngineError
from weft.core.plan import Float32s
from weft.speech.base import AUTO, Facts

SPEEDS = (0.25, 4.0)  # as OpenAI's; the network takes any
_FETCHED = "pinyin"  # phonemes of this type need a model from the network


class PiperSynthesizer:
    """Speech by a network, on the CPU. It is not the same twice: the network adds noise.

    Voices are "auto", the voice's default speaker, and, where it has several, their names or numbers.
    """

    def __init__(self, path: str) -> None:
        """`path`: of the .onnx. Raises ImportError without `piper-tts`, EngineError for what is not a voice."""
        from piper import PiperVoice

        logging.getLogger("piper").setLevel(logging.ERROR)  # it would warn of every sign that a voice does not know
        for file in (path, f"{path}.json"):
            if not Path(file).is_file():
                raise EngineError(f"{file}: there is no such file", code="speech_failed")
        try:
            self._voice = PiperVoice.load(path)
        except Exception as error:  # whatever a broken file makes of json, the package or onnxruntime
            text = f"{path} is not a Piper voice ({type(error).__name__}: {error})"
            raise EngineError(text, code="speech_failed") from None
        config = self._voice.config
        if config.phoneme_type == _FETCHED:
            text = f"{path}: voices with phonemes of the type {_FETCHED!r} are not supported"
            raise EngineError(text, code="speech_failed")
        self._speakers = _speakers(config.num_speakers, dict(config.speaker_id_map))
        names = tuple(config.speaker_id_map)
        self.facts = Facts("piper", config.sample_rate, SPEEDS, (AUTO, *names), tuple(self._speakers))
        self._try(path)

    def speak(self, text: str, voice: str, speed: float, reference: Float32s | None = None) -> Float32s:
        """float32 [samples] at the voice's rate. Raises EngineError."""
        from piper import SynthesisConfig

        text = text.encode("utf-8", "replace").decode().replace("\0", " ")
        text = text.replace("[[", "[ [")  # otherwise phonemes would begin here
        speaker = None if voice.lower() == AUTO else self._speakers[voice.lower()]
        config = SynthesisConfig(speaker_id=speaker, length_scale=self._voice.config.length_scale / speed)
        pieces = [np.atleast_1d(chunk.audio_float_array) for chunk in self._voice.synthesize(text, config)]
        samples: Float32s = np.concatenate([np.zeros(0, np.float32), *pieces])
        return samples

    def close(self) -> None:
        """A clause is said to its end."""

    def _try(self, path: str) -> None:
        """Speaks once: only then is it known that the network takes what it is given, and gives sound."""
        try:
            samples = self.speak("a b c", AUTO, 1.0)
        except Exception as error:
            text = f"{path} cannot speak ({type(error).__name__}: {error})"
            raise EngineError(text, code="speech_failed") from None
        if not len(samples) or not np.isfinite(samples).all():
            raise EngineError(f"{path} cannot speak (it makes no sound of 'a b c')", code="speech_failed")


def _speakers(count: int, by_name: dict[str, int]) -> dict[str, int]:
    """Ids by name, in lower case, and, where there are several, by number."""
    numbers = {str(number): number for number in range(count)} if count > 1 else {}
    return numbers | {name.lower(): number for name, number in by_name.items()}
