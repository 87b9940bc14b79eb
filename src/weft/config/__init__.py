"""Floor 1: one typed tree of settings, resolved once from defaults, file, environment and flags, then frozen.

Every setting here has an effect; unknown keys are errors. Whoever needs settings is handed a `Settings`.
"""

from __future__ import annotations

from weft.config.describe import Row, describe, format_value, from_json, masked, to_json
from weft.config.resolve import Resolved, resolve
from weft.config.settings import (
    Auto,
    BackendSettings,
    EngineSettings,
    FakeSettings,
    HttpSettings,
    KvCacheSettings,
    LogSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    SpeechSettings,
    TextSettings,
    TorchSettings,
)

__all__ = [
    "Auto",
    "BackendSettings",
    "EngineSettings",
    "FakeSettings",
    "HttpSettings",
    "KvCacheSettings",
    "LogSettings",
    "ModelSettings",
    "Resolved",
    "Row",
    "SchedulerSettings",
    "Settings",
    "SpeechSettings",
    "TextSettings",
    "TorchSettings",
    "describe",
    "format_value",
    "from_json",
    "masked",
    "resolve",
    "to_json",
]
