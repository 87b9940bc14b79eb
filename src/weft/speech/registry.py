"""The speech engine that the settings ask for. What it needs is imported by its helper process only."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from weft.config.settings import Settings
from weft.core.errors import EngineError, InvalidRequestError, SettingsError
from weft.speech.helper import HelperSynthesizer, MissingPackageError, helper_command
from weft.speech.speaker import Speaker

logger = logging.getLogger(__name__)


def create_speaker(settings: Settings) -> Speaker | None:
    """What speaks here; None: nothing does. Raises SettingsError, naming the extra where it is missing."""
    engine, file = settings.speech.engine, settings.speech.piper_voice
    if engine == "piper" and file is None:
        raise SettingsError("speech.piper_voice: the engine 'piper' needs a voice, the path of an .onnx file")
    if engine == "espeak" and file is not None:
        raise SettingsError("speech.piper_voice: the engine 'espeak' has no use for it (speech.engine: auto or piper)")
    if engine == "none":
        return None
    if file is not None:
        return _with_voice(_piper(file), settings.speech.voice)
    synthesizer = _espeak(asked_for=engine == "espeak")
    return None if synthesizer is None else _with_voice(synthesizer, settings.speech.voice)


def _piper(file: str) -> HelperSynthesizer:
    try:
        return HelperSynthesizer(helper_command("piper", file), keep=True)
    except MissingPackageError as error:
        text = f"speech.piper_voice: it needs piper-tts, which is not installed (pip install 'weft[piper]'): {error}"
        raise SettingsError(text) from None
    except EngineError as error:
        raise SettingsError(f"speech.piper_voice: {error.message}") from None


def _espeak(asked_for: bool) -> HelperSynthesizer | None:
    if not asked_for and find_spec("espeakng_loader") is None:
        return None
    try:
        return HelperSynthesizer(helper_command("espeak"), keep=False)
    except MissingPackageError:
        text = "speech.engine: 'espeak' needs espeakng-loader, which is not installed (pip install 'weft[speech]')"
        raise SettingsError(text) from None
    except EngineError as error:
        if asked_for:
            raise SettingsError(f"speech.engine: {error.message}") from None
        logger.warning("no speech: %s", error.message)
        return None


def _with_voice(synthesizer: HelperSynthesizer, voice: str) -> Speaker:
    speaker = Speaker(synthesizer, voice)
    try:
        speaker.begin(voice, 1.0, None)
    except InvalidRequestError as error:
        speaker.close()
        raise SettingsError(f"speech.{error.message}") from None
    return speaker
