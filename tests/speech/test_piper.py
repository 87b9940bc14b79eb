"""Piper voices on onnxruntime, with a network small enough to say what it must do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.speech.tiny_voices import HOP, write_voice
from weft.config import resolve
from weft.core.errors import EngineError, SettingsError
from weft.speech.registry import create_speaker

pytest.importorskip("piper", reason="needs the extra weft[piper]")
pytest.importorskip("onnxruntime", reason="needs the extra weft[piper]")

from weft.speech.piper import PiperSynthesizer  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.onnx"


def loaded(file: Path, **voice: Any) -> PiperSynthesizer:
    return PiperSynthesizer(str(write_voice(file, **voice)))


def ids(text: str) -> int:
    """How many ids the network gets: begin, end, and one to pad each of the others."""
    return 2 * len(text) + 3


def test_lengths(file: Path) -> None:
    piper = loaded(file)
    assert (piper.facts.name, piper.facts.sample_rate, piper.facts.voices) == ("piper", 16_000, ("auto",))
    for text in ("a", "abc", "a, b."):
        samples = piper.speak(text, "auto", 1.0)
        assert samples.dtype == np.float32 and len(samples) == HOP * ids(text)
    assert samples[0] == 1 and np.allclose(samples[1:], 0.1)


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_speed(file: Path, speed: float) -> None:
    piper = loaded(file, inference={"noise_scale": 0.5, "length_scale": 2.0, "noise_w": 0.5})
    assert len(piper.speak("abc", "auto", speed)) == pytest.approx(2 * HOP * ids("abc") / speed, abs=1)


def test_speakers(file: Path) -> None:
    piper = loaded(file, speakers=3)
    assert piper.facts.voices == ("auto", "Speaker0", "Speaker1", "Speaker2")
    assert {"0", "1", "2", "speaker2"} == set(piper.facts.more_voices) - {"speaker0", "speaker1"}
    for voice, value in (("auto", 0.1), ("Speaker0", 0.1), ("speaker2", 0.3), ("1", 0.2)):
        assert np.allclose(piper.speak("a", voice, 1.0)[1:], value)


def test_english_becomes_phonemes(file: Path) -> None:
    piper = loaded(file, phoneme_type="espeak")
    short, long = (len(piper.speak(text, "auto", 1.0)) for text in ("The cat.", "The cat sat on the mat."))
    assert HOP * 9 < short < long


@pytest.mark.parametrize("kind", ["text", "espeak"])
@pytest.mark.parametrize("text", ["", " ", "...", "\n", "\ud800", "😀", "a\0b", "[[x]] a", "<b>&amp;", "é" * 200])
def test_no_text_is_too_odd(file: Path, kind: str, text: str) -> None:
    assert np.isfinite(loaded(file, phoneme_type=kind).speak(text, "auto", 1.0)).all()


def test_brackets_are_text(file: Path) -> None:
    piper = loaded(file, phoneme_type="espeak")
    assert len(piper.speak("[[aaaaaaaaaaaaaaaaaaaa]]", "auto", 1)) == len(
        piper.speak("aaaaaaaaaaaaaaaaaaaa", "auto", 1)
    )


@pytest.mark.parametrize(
    ("voice", "words"),
    [
        ({"model": b"nonsense"}, "is not a Piper voice"),
        ({"model": b""}, "is not a Piper voice"),
        ({"num_speakers": 2}, "cannot speak"),  # the network does not know them
        ({"phoneme_type": "pinyin"}, "'pinyin' are not supported"),
        ({"phoneme_type": "songs"}, "is not a Piper voice .ValueError"),
        ({"phoneme_id_map": {"a": [4]}}, "cannot speak .KeyError"),  # nothing to begin with
        ({"audio": {}}, "is not a Piper voice .KeyError: 'sample_rate'"),
    ],
)
def test_broken_voices(file: Path, voice: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        loaded(file, **voice)
    assert str(file) in caught.value.message


def test_files_that_are_not_there(file: Path) -> None:
    with pytest.raises(EngineError, match="tiny.onnx: there is no such file"):
        PiperSynthesizer(str(file))
    file.write_bytes(b"")
    with pytest.raises(EngineError, match="tiny.onnx.json: there is no such file"):
        PiperSynthesizer(str(file))


# ---- through the settings, in a helper ---------------------------------------------------------------------------


def test_a_voice_that_the_settings_name(file: Path) -> None:
    write_voice(file, speakers=2)
    for sets in ([], ["speech.engine=piper", "speech.voice=SPEAKER1"]):
        speaker = create_speaker(resolve(sets=[f"speech.piper_voice={file}", *sets]).settings)
        assert speaker is not None and speaker.name == "piper"
        samples = speaker.begin(speaker.default_voice, 1.0, None).say("abc")
        assert len(samples) == HOP * ids("abc") * 24_000 // 16_000
        assert np.allclose(samples[200:-200], 0.2 if sets else 0.1, atol=1e-2)
        speaker.close()


def test_a_broken_voice_keeps_the_server_from_starting(file: Path) -> None:
    for sets in ([], ["speech.engine=piper"]):
        with pytest.raises(SettingsError, match="speech.piper_voice: .*no such file"):
            create_speaker(resolve(sets=[f"speech.piper_voice={file}", *sets]).settings)
    write_voice(file, model=b"nonsense")
    with pytest.raises(SettingsError, match="speech.piper_voice: .*not a Piper voice"):
        create_speaker(resolve(sets=[f"speech.piper_voice={file}"]).settings)
    write_voice(file)
    with pytest.raises(SettingsError, match="speech.voice: 'x' is not allowed .allowed: auto"):
        create_speaker(resolve(sets=[f"speech.piper_voice={file}", "speech.voice=x"]).settings)
