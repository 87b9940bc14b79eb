"""`python -m weft.launch.spawned`: a worker that belongs to a gateway on the same machine.

It reads its settings as one line of JSON from standard input, and serves as `weft serve` does. When the input closes,
because the gateway has gone however it went, it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from weft.config.describe import from_json
from weft.core.errors import WeftError
from weft.launch.parent import settings_line, when_it_ends
from weft.launch.supervisor import serve


def _end() -> None:
    for _ in range(2):  # the second one does not wait for open requests: nobody is there to hear their answers
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)


def main() -> int:
    line = settings_line()
    if line is None:
        return 1
    when_it_ends(_end)
    try:
        return serve(from_json(line))
    except WeftError as error:
        print(f"weft: error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
