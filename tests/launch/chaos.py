"""Clients that misbehave, over raw sockets, each from a seed; and what must be true when they are gone.

A client writes down what it knows of its requests: how each ended, or that it did not stay to see. The server's books
are compared with that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launch.worker import END_LIMIT_S, Worker, children_of

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Allowed = frozenset[int]


@dataclass
class Book:
    """What all clients together have seen.

    Attributes:
        seen: how requests ended: "completed", an error's code, or "unseen" (sent whole, the client left).
        states: ending by request id, where the client knows both.
        wrong: whatever must not happen, in words.
    """

    seen: Counter[str] = field(default_factory=Counter)
    states: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def note(self, outcome: str, request_id: int | None = None) -> None:
        self.seen[outcome] += 1
        if request_id is not None:
            if request_id in self.states:
                self.wrong.append(f"request {request_id} ended twice: {self.states[request_id]}, {outcome}")
            self.states[request_id] = outcome


@dataclass
class Answer:
    """A response, read to its end: status, headers, body; `cut` when the connection closed before."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: bool = False

    @property
    def request_id(self) -> int:
        return int(self.headers["x-request-id"])

    @property
    def outcome(self) -> str:
        """How the request ended."""
        if self.status != 200:
            return str(json.loads(self.body)["error"]["code"])
        if self.headers["content-type"].startswith("application/json"):
            return "completed"
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        if data[-1] == "[DONE]":
            return "completed"
        return str(json.loads(data[-1])["error"]["code"])


class Connection:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, body: dict[str, Any] | bytes, *, declared: int | None = None) -> None:
        """Writes a POST; `declared` claims another length."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = len(data) if declared is None else declared
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        self.writer.write(head.encode() + data)

    async def read(self, *, pause_s: float = 0.0) -> Answer:
        """Reads one whole answer; with a pause between small pieces, like a client that cannot keep up."""
        answer = Answer()
        try:
            answer.status = int((await self.reader.readline()).split()[1])
            while (line := await self.reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode().partition(":")
                answer.headers[name.lower()] = value.strip()
            if "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
                return answer
            while True:
                size = int(await self.reader.readline(), 16)
                answer.body += (await self.reader.readexactly(size + 2))[:size]
                if not size:
                    return answer
                if pause_s:
                    await asyncio.sleep(pause_s)
        except (IndexError, ValueError, asyncio.IncompleteReadError, ConnectionError):
            answer.cut = True
            return answer

    def reset(self) -> None:
        """Closes with a reset: whatever is on its way is lost."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Crowd:
    """Clients of one worker, and their book."""

    def __init__(self, worker: Worker, seed: int, *, max_tokens: int = 40, prompts: int = 12) -> None:
        self.book = Book()
        host, port = worker.url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._rng = random.Random(seed)
        self._max_tokens = max_tokens
        self._prompts = prompts
        self._kinds: list[Callable[[random.Random], Awaitable[None]]] = [
            *(self.plain, self.stream, self.stream, self.slow, self.keep_alive, self.pipelined),
            *(self.half_close, self.vanish_at_once, self.vanish_mid_stream, self.vanish_mid_body),
            *(self.garbage, self.bad_request, self.abort),
        ]

    async def run(self, count: int) -> Book:
        """So many clients at once, each of a kind that the seed decides."""
        seeds = [self._rng.randrange(2**32) for _ in range(count)]
        kinds = [self._kinds[k % len(self._kinds)] for k in range(count)]
        self._rng.shuffle(kinds)
        async with asyncio.timeout(END_LIMIT_S * 2):
            await asyncio.gather(*(kind(random.Random(seed)) for kind, seed in zip(kinds, seeds, strict=True)))
        return self.book

    # ---- the well-behaved -------------------------------------------------------------------------------------

    async def plain(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng))
            self._judge(await connection.read())

    async def stream(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng, stream=True))
            self._judge(await connection.read())

    async def slow(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng, stream=True))
            self._judge(await connection.read(pause_s=0.02))

    async def keep_alive(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            for number in range(3):
                connection.send("/v1/completions", self._body(rng, stream=number == 1))
                self._judge(await connection.read())

    async def pipelined(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng))
            connection.send("/v1/completions", self._body(rng, stream=True))
            for _ in range(2):
                self._judge(await connection.read())

    async def abort(self, rng: random.Random) -> None:
        """Ends its own stream from a second connection, as soon as it knows the number."""
        async with self._connection() as connection, self._connection() as second:
            connection.send("/v1/completions", self._body(rng, stream=True))
            line = b""
            while not line.startswith(b"x-request-id"):
                if not (line := await connection.reader.readline()):
                    self.book.note("unseen")
                    return
            second.send("/abort", {"request_id": int(line.split(b":")[1])})
            answer = await second.read()
            if answer.status not in (200, 404):  # 404: it had just ended
                self.book.wrong.append(f"/abort answered {answer.status}")
            rest = (await connection.reader.read(-1) if answer.status == 0 else await self._rest(connection)).decode()
            code = "completed" if "[DONE]" in rest else "cancelled" if '"cancelled"' in rest else None
            if code is None and '"code"' not in rest:
                self.book.wrong.append(f"an aborted stream ended with {rest[-200:]!r}")
            self.book.note(code or "other", int(line.split(b":")[1]))

    # ---- the others -------------------------------------------------------------------------------------------

    async def half_close(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng, stream=rng.random() < 0.5))
            connection.writer.write_eof()
            answer = await connection.read()
            if answer.cut:
                self.book.note("unseen")  # the server may take it for a client that has gone
            else:
                self._judge(answer)

    async def vanish_at_once(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng, stream=rng.random() < 0.5))
            await connection.writer.drain()
            self.book.note("unseen")
            connection.reset()

    async def vanish_mid_stream(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", self._body(rng, stream=True))
            await connection.reader.read(rng.randrange(1, 3000))
            self.book.note("unseen")
            connection.reset()

    async def vanish_mid_body(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.send("/v1/completions", b'{"prompt": "Once', declared=500)
            await connection.writer.drain()
            connection.reset()

    async def garbage(self, rng: random.Random) -> None:
        async with self._connection() as connection:
            connection.writer.write(rng.randbytes(rng.randrange(1, 4000)) + b"\r\n\r\n")
            data = b""
            try:
                connection.writer.write_eof()
                data = await connection.reader.read(-1)
            except ConnectionError:
                pass
            if data and not data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404")):
                self.book.wrong.append(f"garbage was answered with {data[:80]!r}")

    async def bad_request(self, rng: random.Random) -> None:
        bodies: list[dict[str, Any] | bytes] = [
            b'{"prompt": ',
            b"[]",
            {"prompt": "x", "max_tokens": -1},
            {"prompt": "x", "temperature": "hot"},
            {"prompt": "x", "no_such_parameter": 1},
            {"prompt": [2**30], "max_tokens": 1},
            {"prompt": "x " * 5000, "max_tokens": 1},
        ]
        async with self._connection() as connection:
            for body in rng.sample(bodies, 3):
                connection.send("/v1/completions", body)
                answer = await connection.read()
                if answer.status not in (400, 429) or answer.cut:  # a full queue refuses before it reads
                    self.book.wrong.append(f"{str(body)[:60]} was answered with {answer.status}")

    # ---- insides ----------------------------------------------------------------------------------------------

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        """A prompt that shares its beginning with those of others."""
        family = rng.randrange(self._prompts)
        return {
            "prompt": [10 + family] * rng.randrange(1, 60) + [rng.randrange(10, 200) for _ in range(rng.randrange(5))]
            or [5],
            "max_tokens": rng.randrange(1, self._max_tokens),
            "ignore_eos": rng.random() < 0.5,
            "temperature": rng.choice([0, 1]),
        } | more

    def _judge(self, answer: Answer) -> None:
        """Who stays to the end gets a whole answer, or a refusal that says when to come back."""
        if answer.cut:
            self.book.wrong.append(f"an answer was cut short after {answer.status} and {answer.body[-100:]!r}")
            return
        outcome = answer.outcome
        self.book.note(outcome, answer.request_id)
        if answer.status == 429:
            if not answer.headers.get("retry-after", "").isdigit():
                self.book.wrong.append("429 without Retry-After")
        elif outcome != "completed":
            self.book.wrong.append(f"{answer.status}: {answer.body[-200:]!r}")

    async def _rest(self, connection: Connection) -> bytes:
        """The rest of a chunked answer, from within its headers."""
        rest = b""
        while not rest.endswith(b"\r\n0\r\n\r\n"):
            piece = await connection.reader.read(65536)
            if not piece:
                break
            rest += piece
        return rest

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()


# ---- what must be true afterwards ------------------------------------------------------------------------------------


def until_idle(worker: Worker) -> dict[str, Any]:
    """The stats once nothing is open any more."""
    end_s = time.monotonic() + END_LIMIT_S
    while True:
        stats = worker.stats()
        requests = stats["requests"]
        if stats["engine"]["idle"] and not any(requests[k] for k in ("queued", "pending", "processing")):
            return stats
        assert time.monotonic() < end_s, f"still busy: {stats}"


def assert_clean(worker: Worker) -> None:
    """Once it is idle: gauges at zero, and no token of KV and no sequence id lost."""
    stats = until_idle(worker)
    kv = stats["kv"]
    assert kv["active"] == 0 and kv["free"] + kv["cached"] == kv["capacity"], stats
    assert stats["batch"]["rows"] == 0, stats
    worker.http.post("/flush_cache").raise_for_status()
    stats = worker.stats()
    assert stats["kv"]["free"] == kv["capacity"] and not stats["kv"]["host"], stats
    assert stats["sequence_ids"]["used"] == 0, stats


def assert_books_agree(worker: Worker, book: Book, before: dict[str, int]) -> None:
    """Every request that a client knows of ended exactly once, and as the client saw it."""
    assert not book.wrong, book.wrong[:5]
    listed = {r["id"]: r for r in worker.http.get("/v1/requests").raise_for_status().json()["requests"]}
    for request_id, outcome in book.states.items():
        if request_id in listed:
            expected = {"completed": "completed", "cancelled": "cancelled"}.get(outcome, "rejected")
            assert listed[request_id]["state"] == expected, (outcome, listed[request_id])
    finished = worker.stats()["requests"]["finished"]
    ended = {state: finished[state] - before[state] for state in finished}
    assert ended["failed"] == 0 and ended["timeout"] == 0, ended
    seen, unseen = book.seen, book.seen["unseen"]
    assert seen["completed"] <= ended["completed"] <= seen["completed"] + unseen, (ended, seen)
    assert seen["cancelled"] <= ended["cancelled"] <= seen["cancelled"] + unseen, (ended, seen)
    certain = sum(seen.values()) - unseen
    assert certain <= sum(ended.values()), (ended, seen)


def processes(worker: Worker) -> list[int]:
    return [worker.pid, *children_of(worker.pid)]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS_PER_S
