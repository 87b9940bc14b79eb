"""eSpeak NG itself: real audio."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from weft.core.errors import EngineError

pytest.importorskip("espeakng_loader", reason="needs the extra weft[speech]")

from weft.speech.espeak import EspeakSynthesizer  # noqa: E402

ENGLISH = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def espeak() -> EspeakSynthesizer:
    return EspeakSynthesizer()


def seconds(espeak: EspeakSynthesizer, text: str, voice: str = "auto", speed: float = 1.0) -> float:
    samples = espeak.speak(text, voice, speed)
    assert samples.dtype == np.float32 and np.abs(samples).max() <= 1
    assert np.sqrt(np.mean(samples**2)) > 0.02  # it is to be heard
    return len(samples) / espeak.facts.sample_rate


def test_english(espeak: EspeakSynthesizer) -> None:
    assert 2 < seconds(espeak, ENGLISH) < 4


def test_chinese(espeak: EspeakSynthesizer) -> None:
    text = "你好，今天天气很好。"
    assert 1.5 < seconds(espeak, text) < 5
    np.testing.assert_array_equal(espeak.speak(text, "auto", 1), espeak.speak(text, "cmn", 1))
    np.testing.assert_array_equal(espeak.speak(ENGLISH, "auto", 1), espeak.speak(ENGLISH, "en-us", 1))


def test_voices(espeak: EspeakSynthesizer) -> None:
    voices, more = espeak.facts.voices, espeak.facts.more_voices
    assert {"auto", "en-us", "en-gb", "cmn", "de", "fr-fr"} <= set(voices)
    assert {"en", "zh", "english (america)"} <= set(more)
    assert all(len(espeak.speak("1", voice, 1)) for voice in (*voices, "zh", "EN-US", "English (America)"))
    assert len(espeak.speak(ENGLISH, "de", 1)) != len(espeak.speak(ENGLISH, "en-gb", 1))


@pytest.mark.parametrize("speed", [0.5, 2.0, 4.0])
def test_speed(espeak: EspeakSynthesizer, speed: float) -> None:
    assert seconds(espeak, ENGLISH, speed=speed) * speed == pytest.approx(seconds(espeak, ENGLISH), rel=0.2)


def test_the_same_text_gives_the_same_samples(espeak: EspeakSynthesizer) -> None:
    first = espeak.speak(ENGLISH, "en-us", 1)
    espeak.speak("Guten Tag", "de", 2)
    np.testing.assert_array_equal(espeak.speak(ENGLISH, "en-us", 1), first)


def test_two_threads_do_not_mix(espeak: EspeakSynthesizer) -> None:
    cases = [(ENGLISH, "en-us", 1.0), ("你好，世界。", "cmn", 1.5)]
    alone = [espeak.speak(*case) for case in cases]
    together: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def work(number: int) -> None:
        together[number] = [espeak.speak(*cases[number]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert len(together[number]) == 10
        for samples in together[number]:
            np.testing.assert_array_equal(samples, alone[number])


@pytest.mark.parametrize("text", ["", " ", "...", "\n", "\ud800", "😀", "a\0b", "<b>&amp;[[x]]", "é" * 200])
def test_no_text_is_too_odd(espeak: EspeakSynthesizer, text: str) -> None:
    assert np.isfinite(espeak.speak(text, "auto", 1)).all()


def test_nothing_behind_a_zero_is_lost(espeak: EspeakSynthesizer) -> None:
    np.testing.assert_array_equal(espeak.speak("one\0two", "en-us", 1), espeak.speak("one two", "en-us", 1))


def test_data_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espeakng_loader.get_data_path", lambda: "/nowhere")
    with pytest.raises(EngineError, match="/nowhere"):
        EspeakSynthesizer()
