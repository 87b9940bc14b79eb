"""What an engine of speech has to do. Cutting text, resampling and limits are not its business."""

from __future__ import annotations

from typing import Protocol

from weft.core.plan import Float32s

SAMPLE_RATE = 24_000
"""Samples per second of all audio that leaves Weft."""

AUTO = "auto"
"""The voice that an engine chooses by the text."""


class Synthesizer(Protocol):
    """Turns one clause at a time into sound. Any thread may call it, several at a time.

    Attributes:
        name: its name in settings and requests.
        sample_rate: samples per second of what `speak` returns.
        speeds: slowest and fastest speed; 1 is its usual one.
    """

    name: str
    sample_rate: int
    speeds: tuple[float, float]

    def voices(self) -> tuple[str, ...]:
        """What `voice` may be, for people to choose from; always with "auto". Raises EngineError."""

    def has_voice(self, voice: str) -> bool:
        """Whether `speak` takes this voice; it may take more names than `voices` lists. Raises EngineError."""

    def speak(self, text: str, voice: str, speed: float) -> Float32s:
        """The clause as float32 [samples], mono, -1 to 1; nothing for a text without sound.

        `voice` and `speed` are within what this object says. Raises EngineError.
        """
