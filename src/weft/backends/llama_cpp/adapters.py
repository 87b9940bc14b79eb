"""`Adapters`: LoRA adapters in llama.cpp. They are loaded beside the model and applied to a whole context at a time.

An adapter is a GGUF file of its own (`general.type` "adapter", `adapter.type` "lora"). It has to be loaded before the
context is made, which reserves room for its operations, and it changes nothing until a context is told to use it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.backends.llama_cpp.vocabulary import Failures
from weft.core.errors import ModelLoadError


class Adapters:
    """The adapters of one model, numbered from 1 on in the order of `files`; 0 is none.

    Args:
        library: the bindings.
        files: GGUF file by name.
    """

    def __init__(self, library: Any, files: Mapping[str, Path]) -> None:
        self._library = library
        self._files = dict(files)
        self._loaded: list[Any] = []
        self._current = 0

    def load(self, model: Any) -> None:
        """Reads the files. Raises ModelLoadError, with llama.cpp's reason, for one that does not fit the model."""
        for name, file in self._files.items():
            with Failures() as failures:
                adapter = self._library.llama_adapter_lora_init(model, os.fsencode(file))
            if not adapter:
                raise ModelLoadError(f"model.lora {name!r}: {file}: llama.cpp cannot load it: {failures.reason}")
            self._loaded.append(adapter)
            if self._library.llama_adapter_get_alora_n_invocation_tokens(adapter):
                raise ModelLoadError(
                    f"model.lora {name!r}: {file}: an activated LoRA, which works from certain tokens on only; it is"
                    " not supported"
                )

    def reset(self) -> None:
        """There is a new context, which uses none."""
        self._current = 0

    def use(self, context: Any, adapter: int) -> None:
        """Makes the context compute with this adapter from now on. Raises RuntimeError where llama.cpp refuses."""
        if adapter == self._current:
            return
        chosen = self._loaded[adapter - 1 : adapter] if adapter else []
        pointers = (self._library.llama_adapter_lora_p_ctypes * 1)()
        for place, one in enumerate(chosen):
            pointers[place] = ctypes.cast(one, self._library.llama_adapter_lora_p_ctypes)
        scales = (ctypes.c_float * 1)(1.0)
        code = self._library.llama_set_adapters_lora(context, pointers, len(chosen), scales)
        if code:
            raise RuntimeError(f"llama_set_adapters_lora failed with code {code}")
        self._current = adapter

    def close(self) -> None:
        """Gives their memory back; to be called after the context's and before the model's."""
        while self._loaded:
            self._library.llama_adapter_lora_free(self._loaded.pop())
