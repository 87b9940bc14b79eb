"""Asks workers how they are: every `interval_s`, and at once when told to.

Invariants: a worker is asked by one task only, so answers come in the order of the questions; an answer that arrives
after the worker was removed changes nothing. What is said of a worker is only ever its own answer, or that there was
none; what follows from it is `Worker.state`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from weft.gateway.pool import Pool
from weft.gateway.upstream import Headers, Upstream, UpstreamError
from weft.gateway.workers import Worker
from weft.web.errors import log

ANSWER_LIMIT_S = 5.0
MAX_ANSWER_BYTES = 4 << 20
AGAIN_S = 0.5
"""After a check without an answer, and while a worker has never been ready, the next one comes this soon at most."""


class _Count(msgspec.Struct):
    total: int
    used: int


class _Facts(msgspec.Struct):
    """What `GET /worker` has to say."""

    boot_id: str
    model: str
    ready: bool
    draining: bool
    requests: _Count
    sessions: _Count
    queued: int
    wait_s: float
    prefill_tokens_per_s: float | None
    tokens_per_char: float | None
    prefixes: list[str]


_decode = msgspec.json.Decoder(_Facts).decode


class Health:
    """Watches the workers of a pool: `upstreams` are the connections to them, by name; `authorization` their key."""

    def __init__(self, pool: Pool, interval_s: float, authorization: Headers) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self._pool = pool
        self._interval_s = interval_s
        self.authorization = authorization
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Event] = {}
        pool.check_now = self.check_now

    def watch(self, worker: Worker) -> None:
        """From now on; the first check is at once."""
        self.upstreams[worker.name] = Upstream(worker.url)
        self._asked[worker.name] = asyncio.Event()
        self._tasks[worker.name] = asyncio.create_task(self._watch(worker), name=f"health {worker.name}")

    def forget(self, worker: Worker) -> None:
        """No more checks; open exchanges go on."""
        self._tasks.pop(worker.name).cancel()
        del self._asked[worker.name]
        self.upstreams.pop(worker.name).close()

    def check_now(self, worker: Worker) -> None:
        """The next check is due."""
        if worker.name in self._asked:
            self._asked[worker.name].set()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for upstream in self.upstreams.values():
            upstream.close()

    async def _watch(self, worker: Worker) -> None:
        upstream, asked = self.upstreams[worker.name], self._asked[worker.name]
        misses = 0
        while self._tasks.get(worker.name) is asyncio.current_task():  # a cancellation may get lost in wait_for
            asked.clear()
            try:
                misses = 0 if await self._check(worker, upstream) else misses + 1
            except Exception:  # a bug; the worker is looked at again all the same
                misses += 1
                log.exception("worker %s: its health check broke", worker.name)
            soon = AGAIN_S * 2.0 ** min(max(0, misses - 1), 8)
            wait_s = self._interval_s if not misses and worker.was_ready else min(self._interval_s, soon)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.wait(), wait_s)

    async def _check(self, worker: Worker, upstream: Upstream) -> bool:
        """Asks once; whether there was an answer."""
        try:
            facts = await self._ask(upstream)
        except UpstreamError as error:
            self._pool.missed(worker, str(error), refused=error.refused)
            return False
        self._pool.heard(worker, facts)
        return True

    async def _ask(self, upstream: Upstream) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                exchange = await upstream.send("GET", "/worker", self.authorization, b"")
                try:
                    data = await exchange.read_all(MAX_ANSWER_BYTES)
                finally:
                    exchange.close()
        except TimeoutError:
            raise UpstreamError(f"no answer about its health within {ANSWER_LIMIT_S:g} s") from None
        if exchange.status != 200:
            raise UpstreamError(f"GET /worker answered {exchange.status}: {data[:200].decode(errors='replace')}")
        try:
            return msgspec.to_builtins(_decode(data))  # type: ignore[no-any-return]
        except msgspec.DecodeError as error:
            raise UpstreamError(f"GET /worker is not what a worker of this version says: {error}") from None
