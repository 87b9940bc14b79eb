"""What a speaker takes, and what it makes of a synthesizer's clauses."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.errors import InvalidRequestError
from weft.core.plan import Float32s
from weft.speech.base import Facts
from weft.speech.speaker import Speaker


class Beeps:
    """A sample per character, 12,000 a second."""

    def __init__(self, **facts: object) -> None:
        self.facts = Facts("beeps", 12_000, (0.5, 4.0), ("auto", "Ann"), ("ann (fast)",), **facts)  # type: ignore[arg-type]
        self.calls: list[tuple[str, str, float, Float32s | None]] = []

    def speak(self, text: str, voice: str, speed: float, reference: Float32s | None = None) -> Float32s:
        self.calls.append((text, voice, speed, reference))
        return np.ones(len(text), np.float32)

    def close(self) -> None:
        self.calls.clear()


def test_clause_by_clause_at_24_khz() -> None:
    beeps = Beeps()
    speech = Speaker(beeps, "auto").begin("ANN", 2, None)
    assert speech.push("This is one sentence. And this") == ["This is one sentence. "]
    assert len(speech.say("This is one sentence. ")) == 44
    assert beeps.calls == [("This is one sentence. ", "ANN", 2, None)]
    assert speech.push(" is another one.\n\n") == []
    assert speech.finish() == ["And this is another one.\n\n"]


@pytest.mark.parametrize("text", ["", " ", "\n\n \t"])
def test_blanks_are_not_said(text: str) -> None:
    speech = Speaker(Beeps(), "auto").begin("auto", 1, None)
    assert speech.push(text) + speech.finish() == []


@pytest.mark.parametrize(
    ("voice", "speed", "reference", "words", "param"),
    [
        ("x", 1.0, None, "voice: 'x' is not allowed (allowed: auto, Ann)", "voice"),
        ("auto", 0.3, None, "speed: 0.3 is not allowed (beeps speaks at 0.5 to 4)", "speed"),
        ("auto", 1.0, np.zeros(9, np.float32), "tts_ref_audio_base64: not supported, beeps", "tts_ref_audio_base64"),
    ],
)
def test_refusals(voice: str, speed: float, reference: Float32s | None, words: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Speaker(Beeps(), "auto").begin(voice, speed, reference)
    assert caught.value.message.startswith(words) and caught.value.param == param


def test_very_many_voices_are_not_all_listed() -> None:
    beeps = Beeps()
    beeps.facts = Facts("beeps", 12_000, (1, 1), tuple(map(str, range(1000))))
    speaker = Speaker(beeps, "0")
    speaker.begin("999", 1, None)
    with pytest.raises(InvalidRequestError, match="149 and 850 more.$"):
        speaker.begin("x", 1, None)


def test_reference_audio_for_who_can_use_it() -> None:
    beeps = Beeps(clones=True)
    reference = np.ones(5, np.float32)
    Speaker(beeps, "auto").begin("auto", 1, reference).say("Hello")
    assert beeps.calls[0][3] is reference
