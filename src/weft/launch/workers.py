"""Workers that a gateway starts itself, on this machine. A dead one is started again, later each time it dies young."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable

import msgspec

from weft.config.describe import to_json
from weft.config.settings import Settings

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STABLE_S = 60.0
"""A worker that has lived for so long is started again without a pause."""

_READY = re.compile(r"weft ready on (http://\S+) ")


class SpawnedWorker:
    """One worker, through all its lives; `port` is the same in all of them.

    `on_ready(url)` is called whenever it serves, `on_death(starts_again)` whenever it has died.
    """

    def __init__(
        self,
        settings: Settings,
        port: int,
        on_ready: Callable[[str], None],
        on_death: Callable[[bool], None],
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.exit_code: int | None = None
        http = msgspec.structs.replace(settings.http, host="127.0.0.1", port=port)
        self._line = to_json(msgspec.structs.replace(settings, http=http)) + b"\n"
        self._on_ready, self._on_death = on_ready, on_death
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Until it is stopped, or cannot be started at all: its settings or its model are bad (exit code 2)."""
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while not self._stopping:
            began_s = loop.time()
            self.exit_code = await self._live()
            if self._stopping:
                return
            again = self.exit_code != 2
            self._on_death(again)
            if not again:
                return
            pause_s = FIRST_PAUSE_S if loop.time() - began_s > STABLE_S else min(LONGEST_PAUSE_S, 2 * pause_s)
            logger.error("the worker at %s ended with code %s; again in %g s", self.url, self.exit_code, pause_s)
            await asyncio.sleep(pause_s)

    async def stop(self, limit_s: float) -> None:
        """Ends it: asks first, then by force."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _live(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weft.launch.spawned"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at a terminal is the gateway's to handle
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(self._line)
            await process.stdin.drain()
        while line := await process.stdout.readline():
            found = _READY.match(line.decode(errors="replace"))
            if found:
                self._on_ready(found[1])
        return await process.wait()
