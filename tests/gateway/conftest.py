"""A gateway on a real socket before scripted workers, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from tests.gateway.scripted import ScriptedWorker
from weft.config.settings import GatewaySettings, HttpSettings, Settings
from weft.gateway.app import Gateway

PATIENCE_S = 20.0  # never waited for unless a test fails


class Running:
    """A gateway that serves: `url`, `http`, and `gateway` itself."""

    def __init__(self, gateway: Gateway, port: int) -> None:
        self.gateway = gateway
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S)
        self.clients: list[Client] = []

    async def client(self, session_id: str = "s") -> Client:
        ws = await connect(f"ws{self.url[4:]}/ws/streaming/{session_id}", compression=None, proxy=None)
        self.clients.append(Client(ws))
        return self.clients[-1]

    async def until(self, fact: Callable[[], Any]) -> None:
        """Waits until something is so; the event loop is the only clock."""
        async with asyncio.timeout(PATIENCE_S):
            while not fact():
                await asyncio.sleep(0.001)

    def usable(self) -> int:
        states = self.gateway.pool.states()
        return states["idle"] + states["busy"]


class Client:
    """A session's client."""

    def __init__(self, ws: ClientConnection) -> None:
        self.ws = ws

    async def send(self, kind: str, **fields: Any) -> None:
        await self.ws.send(json.dumps({"type": kind, **fields}))

    async def next(self, kind: str | None = None) -> dict[str, Any]:
        """The next frame; with `kind`, the next of that kind, and no error before it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                frame: dict[str, Any] = json.loads(await self.ws.recv())
                if kind is None or frame["type"] == kind:
                    return frame
                assert frame["type"] != "error", frame

    async def prefill(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        await self.send("prefill", messages=messages, **fields)
        return await self.next("prefill_done")

    async def answer(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        """The text of the turn, and its `done`."""
        await self.send("generate", **fields)
        return await self.rest()

    async def rest(self) -> tuple[str, dict[str, Any]]:
        text = ""
        while True:
            frame = await self.next()
            assert frame["type"] in ("chunk", "done"), frame
            if frame["type"] == "done":
                return text, frame
            text += frame["text_delta"] or ""

    async def turn(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
        """The route and the text of a whole turn; the answer is added to `messages`."""
        await self.send("prefill", messages=messages)
        route = (await self.next("queue_done"))["route"]
        await self.next("prefill_done")
        text, _ = await self.answer(**fields)
        messages.append({"role": "assistant", "content": text})
        return text, route

    async def vanish(self) -> None:
        """Without a word."""
        self.ws.transport.abort()
        await self.ws.wait_closed()

    async def close(self) -> None:
        await self.ws.close()


@contextlib.asynccontextmanager
async def running(workers: list[ScriptedWorker], **fields: Any) -> AsyncIterator[Running]:
    """Starts workers and a gateway before them; `fields` are settings of `gateway`, or of `http` with `http_`."""
    http = {name.removeprefix("http_"): value for name, value in fields.items() if name.startswith("http_")}
    own = {name: value for name, value in fields.items() if not name.startswith("http_")}
    settings = Settings(http=HttpSettings(**http), gateway=GatewaySettings(**({"health_interval_s": 3600.0} | own)))
    for worker in workers:
        await worker.start()
    gateway = Gateway(settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        gateway.app, log_config=None, lifespan="off", ws="websockets-sansio", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    gateway.start()
    for worker in workers:
        gateway.admin.take_in(worker.url)
    it = Running(gateway, listener.getsockname()[1])
    try:
        await it.until(lambda: server.started and it.usable() == len(workers))
        yield it
    finally:
        for client in it.clients:
            client.ws.transport.abort()
        await it.http.aclose()
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, *(worker.stop() for worker in workers))
        await gateway.close()


@pytest.fixture
def gateway_of() -> Callable[..., Any]:
    return running


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def decode_events(data: bytes) -> list[Any]:
    """The data of all events, without comments."""
    events = []
    for block in data.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(msgspec.json.decode(line[6:]))
    return events


def text_of(data: bytes) -> str:
    return "".join(event["choices"][0]["delta"]["content"] for event in decode_events(data))
