"""Loading a model: what the engine that writes text and the one that makes vectors have in common."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from weft.backends.base import Progress
from weft.backends.llama_cpp.probe import amx_works
from weft.backends.llama_cpp.vocabulary import Failures
from weft.core.errors import ModelLoadError

SMALL_MODEL_BYTES = 64 * 2**20
"""Below this a second thread costs more at every barrier than it computes."""


def load_model(library: Any, path: Path, gpu_layers: int | None, progress: Progress | None) -> Any:
    """llama.cpp's model of a GGUF file, the first one of several; to be freed by the caller.

    `gpu_layers`: None: llama.cpp's own choice. Raises ModelLoadError with llama.cpp's reason.
    """
    params = library.llama_model_default_params()
    if gpu_layers is not None:
        params.n_gpu_layers = gpu_layers
    params.use_extra_bufts = amx_works()
    size = path.stat().st_size

    @library.llama_progress_callback
    def report(share: float, _data: ctypes.c_void_p) -> bool:
        if progress is not None:
            progress(int(share * size), size)
        return True

    params.progress_callback = report
    with Failures() as failures:
        model = library.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelLoadError(f"{path}: llama.cpp cannot load it: {failures.reason}")
    return model


def thread_count(library: Any, model: Any, wanted: int | None) -> int:
    """CPU threads for a model; None: one for a small one, else those that this process may use."""
    if wanted is not None:
        return wanted
    if library.llama_model_size(model) < SMALL_MODEL_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def description(library: Any, model: Any) -> str:
    """A model in llama.cpp's words and its layers, such as "qwen3 0.6B Q8_0, 28 layers"."""
    text = ctypes.create_string_buffer(128)
    library.llama_model_desc(model, text, 128)
    return f"{text.value.decode('utf-8', 'replace')}, {library.llama_model_n_layer(model)} layers"
