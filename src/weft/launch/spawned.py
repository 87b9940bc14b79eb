"""`python -m weft.launch.spawned`: a worker that belongs to a gateway on the same machine.

It reads its settings as one line of JSON from standard input, and serves as `weft serve` does. When the input closes,
because the gateway has gone however it went, it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from weft.config.describe import from_json
from weft.core.errors import WeftError
from weft.launch.supervisor import serve


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    for _ in range(2):  # the second one does not wait for open requests: nobody is there to hear their answers
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)


def main() -> int:
    line = bytearray()
    while not line.endswith(b"\n"):  # byte by byte, so that no buffer swallows the end of the pipe
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        return serve(from_json(bytes(line)))
    except WeftError as error:
        print(f"weft: error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
