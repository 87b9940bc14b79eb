"""Whether this build of llama.cpp computes at all on this machine; a process of its own, since it may crash.

Built with GCC before 13 on a processor with AMX, llama.cpp loads a tile configuration that the compiler has optimised
away, and dies at its first matrix product. `python -m weft.backends.llama_cpp.probe` computes one step of the bundled
model; `amx_works` asks it, on machines where that can happen.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_MODEL = Path(__file__).parents[2] / "assets" / "demo" / "model-q8_0.gguf"
_LIMIT_S = 60.0


@functools.cache
def amx_works() -> bool:
    """False where llama.cpp uses AMX and crashes by it."""
    from weft.backends.llama_cpp.library import load_library

    if b"AMX_INT8 = 1" not in load_library().llama_print_system_info():
        return True
    try:
        done = subprocess.run(
            (sys.executable, "-m", __name__), stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        logger.warning(
            "this build of llama.cpp crashes where it uses AMX; it goes on without. Built with GCC 13 or newer, or with"
            " CMAKE_ARGS=\"-DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8'\", it is faster"
        )
    return not done.returncode


def main() -> None:
    """Loads the bundled model and computes one step."""
    from weft.backends.llama_cpp.batch import Batch
    from weft.backends.llama_cpp.library import load_library

    library: Any = load_library()
    model = library.llama_model_load_from_file(str(_MODEL).encode(), library.llama_model_default_params())
    context = library.llama_init_from_model(model, library.llama_context_default_params())
    tokens = np.arange(10, 26, dtype=np.int32)
    places = np.arange(16, dtype=np.int32)
    batch = Batch(library, 16).fill(tokens, places, np.zeros(16, np.int32), places == 15)
    sys.exit(library.llama_decode(context, batch))


if __name__ == "__main__":
    main()
