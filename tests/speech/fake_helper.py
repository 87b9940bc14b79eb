"""A helper process with a synthesizer that does what the text says. `python fake_helper.py [FACTS_OR_HOW_TO_FAIL]`."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from weft.core.errors import EngineError
from weft.core.plan import Float32s
from weft.speech.base import Facts
from weft.speech.helper import serve


class Obedient:
    """12,000 samples a second; a sample per character, each as loud as the speed says."""

    def __init__(self) -> None:
        how = sys.argv[1] if len(sys.argv) > 1 else ""
        if how == "missing":
            import no_such_package  # type: ignore[import-not-found]  # noqa: F401
        if how == "broken":
            raise ValueError("no good")
        if how == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        print("a library's greeting")
        self.facts = Facts("obedient", 12_000, (0.1, 1.0), clones=True)

    def speak(self, text: str, voice: str, speed: float, reference: Float32s | None = None) -> Float32s:
        print("a library's chatter")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text.startswith("hang"):
            for pipe in text.split()[1:]:
                open(pipe, "w").close()  # whoever opens it for reading knows that this hangs now
            time.sleep(600)
        if text == "fail":
            raise EngineError("it will not")
        if text == "break":
            raise ZeroDivisionError("secret")
        if text == "pid":
            return np.full(100, os.getpid(), np.float32)
        if reference is not None:
            return reference
        return np.full(len(text), speed, np.float32)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Obedient)
