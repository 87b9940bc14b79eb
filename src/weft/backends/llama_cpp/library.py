"""llama-cpp-python's low-level bindings, loaded on first use, with llama.cpp's own log in ours."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from typing import Any

from weft.core.errors import SettingsError

logger = logging.getLogger(__name__)

HOW_TO_GET = "pip install 'weft[llama-cpp]'"
MAX_SEQUENCES = 256
"""`LLAMA_MAX_SEQ`, which the library does not tell."""

# GGML_LOG_LEVEL_WARN and _ERROR; its warnings are about what we do on purpose, such as a cache larger than a context.
_LEVELS = {3: logging.INFO, 4: logging.ERROR}
_kept: list[Any] = []  # callbacks that the library holds on to


def is_installed() -> bool:
    """Whether llama-cpp-python is there; without loading it."""
    return importlib.util.find_spec("llama_cpp") is not None


@functools.cache
def load_library() -> Any:
    """The module `llama_cpp`, ready for use. Raises SettingsError where it is missing or cannot be loaded."""
    if not is_installed():
        raise SettingsError(f"backend.name: 'llama_cpp' needs llama-cpp-python, which is not installed ({HOW_TO_GET})")
    try:
        import llama_cpp
    except Exception as error:  # a library built for another machine fails in many ways
        raise SettingsError(f"backend.name: llama-cpp-python cannot be loaded: {error}") from error

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _data: ctypes.c_void_p) -> None:
        message = text.decode("utf-8", "replace").strip()
        if message.strip("."):
            logger.log(_LEVELS.get(level, logging.DEBUG), "%s", message)

    _kept.append(log)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp
