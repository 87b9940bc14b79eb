"""What the rest of Weft speaks with: a synthesizer, fed clause by clause, at one sample rate."""

from __future__ import annotations

from weft.core.errors import InvalidRequestError
from weft.core.plan import Float32s
from weft.media.resample import resampled
from weft.speech.base import SAMPLE_RATE, Synthesizer
from weft.speech.clauses import ClauseCutter

_SHOWN = 150
"""Voices that an error lists."""


class Speaker:
    """A synthesizer and the voice that it has when none is asked for.

    Attributes:
        name: the synthesizer's.
        sample_rate: of what `Speech.say` returns: 24,000.
        default_voice: one of the synthesizer's voices.
    """

    sample_rate = SAMPLE_RATE

    def __init__(self, synthesizer: Synthesizer, default_voice: str) -> None:
        self.name = synthesizer.facts.name
        self.default_voice = default_voice
        self._synthesizer = synthesizer
        facts = synthesizer.facts
        self._voices = frozenset(voice.lower() for voice in (*facts.voices, *facts.more_voices))

    def begin(self, voice: str, speed: float, reference: Float32s | None) -> Speech:
        """One text's speech. `reference`: float32 [samples], mono, 16 kHz, whose voice is to be imitated.

        Raises InvalidRequestError for a voice, a speed or reference audio that the synthesizer does not take.
        """
        facts = self._synthesizer.facts
        if voice.lower() not in self._voices:
            allowed = ", ".join(facts.voices[:_SHOWN])
            if len(facts.voices) > _SHOWN:
                allowed += f" and {len(facts.voices) - _SHOWN} more"
            raise InvalidRequestError(f"voice: {voice[:80]!r} is not allowed (allowed: {allowed})", param="voice")
        slowest, fastest = facts.speeds
        if not slowest <= speed <= fastest:
            text = f"speed: {speed:g} is not allowed ({self.name} speaks at {slowest:g} to {fastest:g})"
            raise InvalidRequestError(text, param="speed")
        if reference is not None and not facts.clones:
            text = f"tts_ref_audio_base64: not supported, {self.name} cannot imitate a voice"
            raise InvalidRequestError(text, param="tts_ref_audio_base64")
        return Speech(self._synthesizer, voice, speed, reference)

    def close(self) -> None:
        """Breaks off whatever is being said; nothing is said any more."""
        self._synthesizer.close()


class Speech:
    """One text, clause by clause."""

    def __init__(self, synthesizer: Synthesizer, voice: str, speed: float, reference: Float32s | None) -> None:
        self._synthesizer = synthesizer
        self._voice = voice
        self._speed = speed
        self._reference = reference
        self._cutter = ClauseCutter()

    def push(self, text: str) -> list[str]:
        """The clauses that are complete with this text, without those of blanks only: each would be a pause."""
        return [clause for clause in self._cutter.push(text) if not clause.isspace()]

    def finish(self) -> list[str]:
        """The last clause, if there is one."""
        return [clause for clause in self._cutter.finish() if not clause.isspace()]

    def say(self, clause: str) -> Float32s:
        """float32 [samples], mono, 24 kHz. May be called in any thread. Raises EngineError."""
        samples = self._synthesizer.speak(clause, self._voice, self._speed, self._reference)
        return resampled(samples, self._synthesizer.facts.sample_rate, SAMPLE_RATE)
