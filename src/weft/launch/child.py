"""`python -m weft.launch.child ROLE INDEX FOLDER NUM_TEXT`: the start of every child process.

The supervisor writes the settings as one line of JSON to standard input and keeps the pipe open: when it closes, for
whatever reason, the child ends. A child that cannot start says why in a `StartFailed`, and leaves with that exit code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import zmq

from weft.config.describe import from_json
from weft.core.errors import ModelLoadError, SettingsError
from weft.ipc.messages import StartFailed
from weft.ipc.sockets import Endpoints, Outbox
from weft.launch.logs import set_up_logging
from weft.launch.parent import settings_line, when_it_ends


def _end(on_end: list[Callable[[], None]]) -> None:
    """Ends this process, whatever its other threads do."""
    for close in on_end:
        with contextlib.suppress(Exception):
            close()
    os._exit(0)


def main() -> int:
    role, index, folder, num_text = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    line = settings_line()
    if line is None:
        return 1
    on_end: list[Callable[[], None]] = []
    when_it_ends(lambda: _end(on_end))
    settings = from_json(line)
    name = role if role == "engine" else f"{role}{index}"
    set_up_logging(settings.log, name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        if role == "engine":
            from weft.launch import engine_process

            engine_process.main(settings, folder, num_text, context, on_end)
        else:
            from weft.launch import text_process

            text_process.main(settings, folder, num_text, index, context)
    except Exception as error:
        known = isinstance(error, ModelLoadError | SettingsError)
        if not known:
            logging.getLogger(__name__).exception("the %s process failed", name)
        api = Outbox(context, Endpoints(folder, num_text).api)
        message = str(error) if known else f"the {name} process failed: {type(error).__name__}: {error}"
        api.send(StartFailed(name, message, 2 if known else 1))
        api.close()
        context.destroy(linger=1000)
        return 2 if known else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread of a library must not keep a failed process alive
