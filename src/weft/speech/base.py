"""What an engine of speech has to do. Cutting text, resampling and limits are not its business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.core.plan import Float32s

SAMPLE_RATE = 24_000
"""Samples per second of all audio that leaves Weft."""

AUTO = "auto"
"""The voice that an engine chooses itself; every engine has it."""


@dataclass(frozen=True)
class Facts:
    """What a synthesizer can do.

    Attributes:
        name: its name in settings and requests.
        sample_rate: samples per second of what it makes.
        speeds: slowest and fastest speed; 1 is its usual one.
        voices: what `voice` may be, in capitals or not, for people to choose from.
        more_voices: what it may be besides.
        clones: whether it takes reference audio, and speaks with that voice.
    """

    name: str
    sample_rate: int
    speeds: tuple[float, float]
    voices: tuple[str, ...] = (AUTO,)
    more_voices: tuple[str, ...] = ()
    clones: bool = False


class Synthesizer(Protocol):
    """Turns one clause at a time into sound. Any thread may call it, several at a time."""

    facts: Facts

    def speak(self, text: str, voice: str, speed: float, reference: Float32s | None = None) -> Float32s:
        """The clause as float32 [samples], mono, -1 to 1; nothing for a text without sound.

        `voice`, `speed` and `reference` (float32 [samples], mono, 16 kHz) are within the facts. Raises EngineError.
        """

    def close(self) -> None:
        """Breaks off whatever it does, where it can; it speaks no more."""
