"""Which speech engine the settings ask for."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from weft.config import resolve
from weft.core.errors import SettingsError
from weft.speech import registry
from weft.speech.registry import create_speaker

installed = pytest.mark.skipif(find_spec("espeakng_loader") is None, reason="needs the extra weft[speech]")


def test_a_missing_package_is_named_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    assert create_speaker(resolve().settings) is None
    with pytest.raises(SettingsError, match=r"speech.engine: .*weft\[speech\]"):
        create_speaker(resolve(sets=["speech.engine=espeak"]).settings)


def test_none() -> None:
    assert create_speaker(resolve(sets=["speech.engine=none"]).settings) is None


@installed
def test_what_is_installed_speaks() -> None:
    speaker = create_speaker(resolve(sets=["speech.voice=cmn"]).settings)
    assert speaker is not None and (speaker.name, speaker.default_voice) == ("espeak", "cmn")
    with pytest.raises(SettingsError, match="speech.voice: 'x' is not allowed .allowed: auto, "):
        create_speaker(resolve(sets=["speech.voice=x"]).settings)


@installed
def test_a_broken_install_is_an_error_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espeakng_loader.get_data_path", lambda: "/nowhere")
    assert create_speaker(resolve().settings) is None
    with pytest.raises(SettingsError, match="speech.engine: .*/nowhere"):
        create_speaker(resolve(sets=["speech.engine=espeak"]).settings)
