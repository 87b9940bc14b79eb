"""`Children`: one engine process and its text processes, from start to stop.

A child that dies is reported once; so is one that hangs, after it was killed: its heartbeat has been missed for
`engine.heartbeat_s`. That is counted in ticks of this process's own loop, since whoever was stopped itself (a suspended
laptop, SIGSTOP) has heard nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from weft.config.describe import to_json
from weft.config.settings import Settings
from weft.core.errors import UnavailableError
from weft.engine.client import EngineClient
from weft.ipc.sockets import Endpoints

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # a child that fails sends its reason just before it exits
_CLOSE_S = 3.0  # for children that are being stopped
_TICKS = 8
"""A child is silent for `engine.heartbeat_s` when so many looks at it in a row have found nothing new."""


def new_endpoints(settings: Settings) -> Endpoints:
    """Inboxes for one set of children, in a fresh folder that only this user can read."""
    return Endpoints(Path(tempfile.mkdtemp(prefix="weft-")), max(1, settings.text.num_tokenizers))


class Children:
    """See the module's docstring.

    Args:
        settings: given to every child.
        endpoints: their inboxes; the folder is theirs, and goes with them.
        client: fails with the reason when a child dies.
        on_death: called once, after that.

    Attributes:
        roles: their names.
    """

    def __init__(
        self, settings: Settings, endpoints: Endpoints, client: EngineClient, on_death: Callable[[], None]
    ) -> None:
        self.roles = ["engine", *(f"text{index}" for index in range(endpoints.num_text))]
        self._settings = settings
        self._endpoints = endpoints
        self._client = client
        self._on_death = on_death
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._hung: dict[str, None] = {}

    async def start(self) -> None:
        """Starts all of them. The client has to be open at their endpoints."""
        line = to_json(self._settings) + b"\n"
        for name in self.roles:
            role, index = ("engine", "0") if name == "engine" else ("text", name.removeprefix("text"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft.launch.child", role, index),
                *(str(self._endpoints.folder), str(self._endpoints.num_text)),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at a terminal is the supervisor's to handle
            )
            assert process.stdin is not None
            # It may be dead already (uvloop then raises RuntimeError); its watcher will say so.
            with contextlib.suppress(ConnectionError, RuntimeError):
                process.stdin.write(line)
                await process.stdin.drain()
            self._processes[name] = process
            self._tasks.append(asyncio.create_task(self._watch(name, process)))

    def watch_heartbeats(self) -> None:
        """To be called when all are ready: from now on silence is a sickness (loading may take minutes)."""
        self._tasks.append(asyncio.create_task(self._listen()))

    async def stop(self) -> None:
        """Ends all of them, in the end by force."""
        for task in self._tasks:
            task.cancel()
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        waiting = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_CLOSE_S)
            for process in self._processes.values():
                _kill(process)
            if late:
                await asyncio.wait(late)
        shutil.rmtree(self._endpoints.folder, ignore_errors=True)

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if code > 0:
            await self._client.wait_failure(_LAST_WORDS_S)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if name in self._hung:
            how = f"was silent for {self._settings.engine.heartbeat_s:g} s, hung, and was killed"
        self._client.fail(UnavailableError(f"the {name} process {how}", code="engine_dead"))
        self._on_death()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        period_s = self._settings.engine.heartbeat_s / _TICKS
        silent = dict.fromkeys(self.roles, 0)
        heard = dict(self._client.last_heartbeat_s)
        while True:
            before_s = loop.time()
            await asyncio.sleep(period_s)
            late = loop.time() - before_s > 2 * period_s
            for name in self.roles:
                last_s = self._client.last_heartbeat_s.get(name)
                silent[name] = 0 if late or last_s != heard.get(name) else silent[name] + 1
                if last_s is not None:
                    heard[name] = last_s
                if silent[name] >= _TICKS and name not in self._hung:
                    logger.error("the %s process is silent; it is killed", name)
                    self._hung[name] = None
                    _kill(self._processes[name])


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
