"""Which speech engine the settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from weft.config import resolve
from weft.core.errors import SettingsError
from weft.speech import registry
from weft.speech.registry import create_speaker

installed = pytest.mark.skipif(find_spec("espeakng_loader") is None, reason="needs the extra weft[speech]")

Put = Callable[[str, str], None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts a module before everything else, for processes that are started."""

    def put(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))

    return put


def test_a_missing_package_is_named_where_it_is_asked_for(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    put("espeakng_loader", "raise ImportError('not here')")
    assert create_speaker(resolve().settings) is None
    with pytest.raises(SettingsError, match=r"speech.engine: .*weft\[speech\]"):
        create_speaker(resolve(sets=["speech.engine=espeak"]).settings)
    put("piper", "raise ImportError('not here')")
    with pytest.raises(SettingsError, match=r"speech.piper_voice: .*weft\[piper\].*not here"):
        create_speaker(resolve(sets=["speech.piper_voice=x.onnx"]).settings)


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HelperSynthesizer", None)
    assert create_speaker(resolve(sets=["speech.engine=none"]).settings) is None
    assert create_speaker(resolve(sets=["speech.engine=none", "speech.piper_voice=x.onnx"]).settings) is None


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["speech.engine=piper"], "speech.piper_voice: the engine 'piper' needs a voice"),
        (["speech.engine=espeak", "speech.piper_voice=x.onnx"], "speech.piper_voice: the engine 'espeak' has no use"),
    ],
)
def test_settings_that_do_not_go_together(sets: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        create_speaker(resolve(sets=sets).settings)


@installed
def test_what_is_installed_speaks() -> None:
    speaker = create_speaker(resolve(sets=["speech.voice=cmn"]).settings)
    assert speaker is not None and (speaker.name, speaker.default_voice) == ("espeak", "cmn")
    assert len(speaker.begin("en-us", 1.0, None).say("Hello there.")) > 12_000
    speaker.close()
    with pytest.raises(SettingsError, match="speech.voice: 'x' is not allowed .allowed: auto, "):
        create_speaker(resolve(sets=["speech.voice=x"]).settings)


@installed
@pytest.mark.parametrize("way", ["'/nowhere'", "__import__('os').kill(__import__('os').getpid(), 9)"])
def test_a_broken_install_is_an_error_only_where_it_was_asked_for(put: Put, way: str) -> None:
    import espeakng_loader

    library = str(espeakng_loader.get_library_path())
    put("espeakng_loader", f"def get_library_path(): return {library!r}\ndef get_data_path(): return {way}")
    assert create_speaker(resolve().settings) is None
    with pytest.raises(SettingsError, match="speech.engine: .*(/nowhere|died)"):
        create_speaker(resolve(sets=["speech.engine=espeak"]).settings)
