"""What the rest of Weft speaks with: a synthesizer, fed clause by clause, at one sample rate."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.errors import InvalidRequestError
from weft.core.plan import Float32s
from weft.media.resample import resampled
from weft.speech.base import SAMPLE_RATE, Synthesizer
from weft.speech.clauses import ClauseCutter


class Speaker:
    """A synthesizer and the voice that it has when none is asked for.

    Attributes:
        name: the synthesizer's.
        sample_rate: of what `speak` yields: 24,000.
        default_voice: one of the synthesizer's voices.
    """

    sample_rate = SAMPLE_RATE

    def __init__(self, synthesizer: Synthesizer, default_voice: str) -> None:
        self.name = synthesizer.name
        self.default_voice = default_voice
        self._synthesizer = synthesizer

    def check(self, voice: str, speed: float) -> None:
        """Raises InvalidRequestError for a voice or a speed that the synthesizer does not have."""
        if not self._synthesizer.has_voice(voice):
            allowed = ", ".join(self._synthesizer.voices())
            raise InvalidRequestError(f"voice: {voice[:80]!r} is not allowed (allowed: {allowed})", param="voice")
        slowest, fastest = self._synthesizer.speeds
        if not slowest <= speed <= fastest:
            text = f"speed: {speed:g} is not allowed ({self.name} speaks at {slowest:g} to {fastest:g})"
            raise InvalidRequestError(text, param="speed")

    def speak(self, text: str, voice: str, speed: float) -> Iterator[Float32s]:
        """The text as float32 [samples], mono, 24 kHz, one array per clause, each made when it is asked for.

        What `check` refuses must not come here. Raises EngineError.
        """
        cutter = ClauseCutter()
        for clause in (*cutter.push(text), *cutter.finish()):
            if clause.isspace():  # it would be a pause of its own
                continue
            samples = self._synthesizer.speak(clause, voice, speed)
            yield resampled(samples, self._synthesizer.sample_rate, SAMPLE_RATE)
