"""The speech engine that the settings ask for, loaded on first use, so that a missing one costs nothing."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from weft.config.settings import Settings
from weft.core.errors import EngineError, InvalidRequestError, SettingsError
from weft.speech.speaker import Speaker

logger = logging.getLogger(__name__)


def create_speaker(settings: Settings) -> Speaker | None:
    """What speaks here; None: nothing does. Raises SettingsError, naming the extra where it is missing."""
    engine, voice = settings.speech.engine, settings.speech.voice
    if engine == "none" or (engine == "auto" and find_spec("espeakng_loader") is None):
        return None
    from weft.speech.espeak import EspeakSynthesizer

    try:
        speaker = Speaker(EspeakSynthesizer(), voice)
    except ImportError:
        text = "speech.engine: 'espeak' needs espeakng-loader, which is not installed (pip install 'weft[speech]')"
        raise SettingsError(text) from None
    except EngineError as error:
        if engine == "espeak":
            raise SettingsError(f"speech.engine: {error.message}") from None
        logger.warning("no speech: %s", error.message)
        return None
    try:
        speaker.begin(voice, 1.0, None)
    except InvalidRequestError as error:
        raise SettingsError(f"speech.{error.message}") from None
    return speaker
