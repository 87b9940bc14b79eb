"""Plain HTTP through the gateway: routes, retries, streams that go on elsewhere, the line, what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import httpx

from tests.gateway.conftest import Running, decode_events, text_of, user
from tests.gateway.scripted import ScriptedWorker, answer_to
from weft.text.digests import chat_digests

PATH = "/v1/chat/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [user(text)], **fields}


def chats(worker: ScriptedWorker) -> list[dict[str, Any]]:
    return [entry for entry in worker.log if entry["type"] == "chat"]


class Stream:
    """A streamed answer, read event by event."""

    def __init__(self, it: Running, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._context = it.http.stream("POST", PATH, json=body, headers=headers)
        self.data = b""

    async def __aenter__(self) -> Stream:
        self.response: httpx.Response = await self._context.__aenter__()
        self._pieces = self.response.aiter_bytes()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._context.__aexit__(*exc_info)

    async def events(self, count: int) -> None:
        while len(decode_events(self.data)) < count:
            self.data += await anext(self._pieces)

    async def rest(self) -> bytes:
        async for piece in self._pieces:
            self.data += piece
        return self.data


async def test_an_answer_passes_through(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        answer = await it.http.post(PATH, json=chat("a"))
        assert answer.json()["choices"][0]["message"]["content"] == answer_to([user("a")])
        assert answer.headers["X-Weft-Route"].startswith("w1; reason=load;")
        sent = chats(worker)[0]["headers"]["x-weft-gateway"]
        assert sent.startswith(f"id={answer.headers['X-Request-Id']}, seed=")
        async with Stream(it, chat("a", stream=True)) as stream:
            data = await stream.rest()
        assert text_of(data) == answer_to([user("a")])
        assert b": tokens" not in data and data.endswith(b"data: [DONE]\n\n")
        assert (await it.http.get("/v1/models")).json()["data"][0]["id"] == "scripted"
        assert (await it.http.get("/nothing")).status_code == 404
        assert it.gateway.pool.leases == {}


async def test_known_prefixes_and_sessions_decide(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    long = "x" * 5000
    second.prefixes = [digest for digest, _ in chat_digests([user(long)])]
    async with gateway_of([first, second]) as it:

        async def route(text: str, **headers: str) -> tuple[str, str]:
            answer = await it.http.post(PATH, json=chat(text), headers=headers)
            worker, reason, *_ = answer.headers["X-Weft-Route"].split("; ")
            return worker, reason.removeprefix("reason=")

        assert await route(long) == ("w2", "prefix")
        assert await route("short") == ("w1", "load")
        assert await route(long) == ("w2", "prefix")
        assert await route(long, **{"X-Session-ID": "s"}) == ("w2", "prefix")
        assert await route("short", **{"X-Session-ID": "s"}) == ("w2", "session")
        first.wait_s, second.wait_s = 0.0, 100.0
        record = it.gateway.pool.workers["w2"]
        it.gateway.pool.check_now(record)
        await it.until(lambda: record.wait_s == 100.0)
        assert await route(long) == ("w1", "load")  # waiting there would take longer than computing it here


async def test_a_request_that_has_sent_nothing_is_retried(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    first.refuse_with = 503
    async with gateway_of([first, second]) as it:
        answer = await it.http.post(PATH, json=chat("a"))
        assert answer.status_code == 200 and answer.headers["X-Weft-Route"].startswith("w2;")
        assert it.gateway.pool.retries == 1
        first.refuse_with = 429
        await it.until(lambda: it.usable() == 2)
        first.log.clear()
        answer = await it.http.post(PATH, json=chat("b"))  # the least recently used one is asked first
        assert answer.status_code == 200 and answer.headers["X-Weft-Route"].startswith("w2;")
        assert len(chats(first)) == 1 and it.gateway.pool.workers["w1"].failures_total == 1  # to be full is no failure
        second.refuse_with = 429
        assert (await it.http.post(PATH, json=chat("c"))).status_code == 429


async def test_retries_are_bounded(gateway_of: Callable[..., Any]) -> None:
    workers = [ScriptedWorker() for _ in range(4)]
    for worker in workers:
        worker.refuse_with = 503
    async with gateway_of(workers) as it:
        answer = await it.http.post(PATH, json=chat("a"))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "worker_failed"
        assert sum(len(chats(worker)) for worker in workers) == 3


async def test_a_stream_goes_on_elsewhere(gateway_of: Callable[..., Any]) -> None:
    """Cut after each number of tokens: the client gets one whole text, and one role."""
    for tokens in range(6):
        first, second = ScriptedWorker(), ScriptedWorker()
        first.hold(tokens)
        async with gateway_of([first, second]) as it, Stream(it, chat("a", stream=True)) as stream:
            await stream.events(tokens) if tokens else await first.waiting_for_step.wait()
            await first.die()
            data = await stream.rest()
            assert text_of(data) == answer_to([user("a")]), tokens
            assert data.count(b'"role"') == 1
            resumed = chats(second)[0]["body"].get("weft_resume")
            assert resumed == (None if tokens == 0 else {"token_ids": list(range(tokens)), "created": 5}), data
            ids = [chats(worker)[0]["headers"]["x-weft-gateway"] for worker in (first, second)]
            assert ids[0].partition(", route")[0] == ids[1].partition(", route")[0]  # the same id, and the same seed
            assert it.gateway.pool.leases == {}


async def test_a_stream_that_cannot_go_on_ends_with_an_error(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    first.hold(2)
    async with gateway_of([first, second]) as it, Stream(it, chat("a", stream=True, n=2)) as stream:
        await stream.events(2)
        await first.die()
        data = await stream.rest()
        assert b"event: error\n" in data and b"cannot be continued" in data
        assert data.count(b'"content"') == 2  # nothing came twice
        assert not chats(second)


async def test_the_only_worker_dies_in_a_stream(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    worker.hold(2)
    async with gateway_of([worker]) as it:
        async with Stream(it, chat("a", stream=True)) as stream:
            await stream.events(2)
            await worker.die()
            data = await stream.rest()
        assert b"event: error\n" in data and b"no_worker" in data
        answer = await it.http.post(PATH, json=chat("a"))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"


async def test_a_client_that_leaves(gateway_of: Callable[..., Any]) -> None:
    """In the middle of an answer: the worker hears of it at once. In the line: its place is free at once."""
    worker = ScriptedWorker(slots=1)
    worker.hold(2)
    async with gateway_of([worker]) as it:
        async with Stream(it, chat("a", stream=True)) as stream:
            await stream.events(2)
            waiting = asyncio.create_task(it.http.post(PATH, json=chat("b")))
            await it.until(lambda: it.gateway.pool.tickets)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            await it.until(lambda: not it.gateway.pool.tickets)
        await worker.gone.wait()
        await it.until(lambda: not it.gateway.pool.leases)
        worker.steps = None
        assert (await it.http.post(PATH, json=chat("c"))).status_code == 200
        assert it.gateway.pool.workers["w1"].failures_total == 0


async def test_requests_wait_in_the_line(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(slots=1)
    worker.hold(0)
    async with gateway_of([worker], http_sse_keep_alive_s=0.05) as it:
        first = asyncio.create_task(it.http.post(PATH, json=chat("a")))
        await it.until(lambda: it.gateway.pool.leases)
        async with Stream(it, chat("b", stream=True)) as stream:  # its headers come while it waits
            assert stream.response.status_code == 200
            third = asyncio.create_task(it.http.post(PATH, json=chat("c")))
            await it.until(lambda: len(it.gateway.pool.tickets) == 2)
            ticket = (await it.http.get("/api/queue")).json()["tickets"][1]
            assert ticket["kind"] == "chat" and ticket["position"] == 2
            assert (await it.http.delete(f"/api/queue/{ticket['ticket_id']}")).status_code == 200
            cancelled = await third
            assert cancelled.status_code == 499 and cancelled.json()["error"]["code"] == "cancelled"
            worker.go(6)
            assert (await first).status_code == 200
            worker.go(6)
            data = await stream.rest()
        assert text_of(data) == answer_to([user("b")]) and b": keep-alive" in data


async def test_waiting_has_an_end(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(slots=1)
    worker.hold(0)
    async with gateway_of([worker], http_queue_timeout_s=0.05) as it:
        first = asyncio.create_task(it.http.post(PATH, json=chat("a")))
        await it.until(lambda: it.gateway.pool.leases)
        answer = await it.http.post(PATH, json=chat("b"))
        assert answer.status_code == 408
        worker.go(6)
        assert (await first).status_code == 200


async def test_abort(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    worker.hold(1)
    async with gateway_of([worker]) as it:
        async with Stream(it, chat("a", stream=True)) as stream:
            await stream.events(1)
            request_id = stream.response.headers["X-Request-Id"]
            assert (await it.http.post("/abort", json={"request_id": 10**6})).status_code == 404
            answer = await it.http.post("/abort", json={"request_id": f"chatcmpl-{request_id}"})
            assert answer.json() == {"aborted": 1}
            assert b'"code":"cancelled"' in await stream.rest()
        await worker.gone.wait()
        assert it.gateway.pool.leases == {}


async def test_a_worker_that_keeps_failing_has_to_rest(gateway_of: Callable[..., Any]) -> None:
    """Its health is good, its answers are not; after a rest it is tried again, with one request."""
    worker, good = ScriptedWorker(), ScriptedWorker()
    worker.refuse_with = 503
    numbers = itertools.count()  # so that nobody holds a prefix of them
    async with gateway_of([worker, good]) as it:
        record = it.gateway.pool.workers["w1"]
        while record.failures < 3:
            await it.until(lambda: record.missed_checks == 0)
            assert (await it.http.post(PATH, json=chat(str(next(numbers))))).status_code == 200
        await it.until(lambda: record.missed_checks == 0)
        assert record.state(it.gateway.pool.clock()) == "error"
        before = len(chats(worker))
        assert (await it.http.post(PATH, json=chat(str(next(numbers))))).status_code == 200
        assert len(chats(worker)) == before
        worker.refuse_with = None
        record.rests_until_s = 0.0  # time has passed
        assert record.room(it.gateway.pool.clock(), turn=False) == 1
        while record.failures:
            assert (await it.http.post(PATH, json=chat(str(next(numbers))))).status_code == 200
        assert record.room(it.gateway.pool.clock(), turn=False) == worker.slots


async def test_workers_come_and_go(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(slots=1), ScriptedWorker()
    async with gateway_of([first]) as it:
        await second.start()
        first.hold(1)
        async with Stream(it, chat("a", stream=True)) as stream:
            await stream.events(1)
            waiting = asyncio.create_task(it.http.post(PATH, json=chat("b")))
            await it.until(lambda: it.gateway.pool.tickets)
            answer = await it.http.post("/workers", json={"url": second.url})
            assert answer.status_code == 201 and answer.json()["name"] == "w2"
            assert (await waiting).headers["X-Weft-Route"].startswith("w2;")  # who waited had it at once
            assert (await it.http.post("/workers", json={"url": second.url})).status_code == 400
            assert (await it.http.post("/workers", json={"url": "ftp://x"})).status_code == 400
            answer = await it.http.delete("/workers/w1")
            assert answer.json() == {"removed": "w1", "in_flight": 1}
            first.go(5)
            assert text_of(await stream.rest()) == answer_to([user("a")])  # what ran there went on
        shown = (await it.http.get("/workers")).json()["workers"]
        assert [worker["name"] for worker in shown] == ["w2"]
        assert (await it.http.delete("/workers/w1")).status_code == 404
        await second.stop()


async def test_a_draining_worker_gets_nothing_new(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    async with gateway_of([first, second]) as it:
        first.draining = True
        record = it.gateway.pool.workers["w1"]
        it.gateway.pool.check_now(record)
        await it.until(lambda: record.draining)
        assert it.gateway.pool.states()["draining"] == 1
        for _ in range(3):
            assert (await it.http.post(PATH, json=chat("a"))).headers["X-Weft-Route"].startswith("w2;")


async def test_keys(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker], http_api_keys=("secret",)) as it:
        assert (await it.http.post(PATH, json=chat("a"))).status_code == 401
        answer = await it.http.post(PATH, json=chat("a"), headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert chats(worker)[0]["headers"]["authorization"] == "Bearer secret"
        assert (await it.http.get("/health")).status_code == 200


async def test_metrics_and_stats(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        await it.http.post(PATH, json=chat("a"))
        text = (await it.http.get("/metrics")).text
        assert 'weft_gateway_workers{state="idle"} 1.0' in text
        assert "weft_gateway_queue_length 0.0" in text
        assert 'weft_gateway_route_total{reason="load"} 1.0' in text
        assert "weft_gateway_retries_total 0.0" in text
        routes = (await it.http.get("/api/routes")).json()
        assert routes["counts"] == {"load": 1} and routes["routes"][0]["worker"] == "w1"
        assert (await it.http.get("/workers/w1/worker")).json()["boot_id"] == "boot-1"
        assert (await it.http.get("/workers/w1/abort")).status_code == 404


async def test_back_pressure(gateway_of: Callable[..., Any]) -> None:
    """Of an answer that nobody reads, little lies in the gateway: the worker's own writes have to wait."""
    big, sent = b"data: " + b"x" * 65536 + b"\n\n", 0

    async def flood(body: dict[str, Any]) -> Any:
        nonlocal sent
        for _ in range(1000):
            yield big
            sent += 1

    worker = ScriptedWorker()
    worker._events = flood  # type: ignore[method-assign,assignment]
    async with gateway_of([worker]) as it:
        host, port = it.url[7:].split(":")
        body = b'{"messages": [{"role": "user", "content": "a"}], "stream": true}'
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body))
        await reader.read(10)
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        assert 0 < sent < 500
        writer.transport.abort()
        await it.until(lambda: not it.gateway.pool.leases)


async def test_everybody_is_aborted(gateway_of: Callable[..., Any]) -> None:
    """Also those who wait: nobody gets somebody else's error, and no place is lost."""
    worker = ScriptedWorker(slots=1)
    worker.hold(0)
    async with gateway_of([worker]) as it:
        calls = [asyncio.create_task(it.http.post(PATH, json=chat(str(i)))) for i in range(4)]
        await it.until(lambda: len(it.gateway.pool.tickets) == 3)
        assert (await it.http.post("/abort", json={"all": True})).json() == {"aborted": 4}
        assert [(await call).status_code for call in calls] == [499] * 4
        await it.until(lambda: not it.gateway.pool.leases and not it.gateway.pool.tickets)
        worker.steps = None
        assert (await it.http.post(PATH, json=chat("again"))).status_code == 200


async def test_a_worker_that_breaks_off_after_the_end(gateway_of: Callable[..., Any]) -> None:
    """All was said: nobody says it again."""
    first, second = ScriptedWorker(), ScriptedWorker()
    first.breaks_off_at_the_end = True
    async with gateway_of([first, second]) as it:
        async with Stream(it, chat("a", stream=True)) as stream:
            data = await stream.rest()
        assert text_of(data) == answer_to([user("a")]) and data.count(b"[DONE]") == 1
        assert not chats(second) and it.gateway.pool.retries == 0


async def test_a_stream_with_a_large_body(gateway_of: Callable[..., Any]) -> None:
    """It is not looked into, so it cannot go on elsewhere; but it ends as a stream does."""
    first, second = ScriptedWorker(), ScriptedWorker()
    first.hold(2)
    async with gateway_of([first, second]) as it, Stream(it, chat("x" * (2 << 20), stream=True)) as stream:
        await stream.events(2)
        await first.die()
        data = await stream.rest()
        assert b"event: error\n" in data and b": tokens" not in data


async def test_odd_session_ids_are_not_remembered(gateway_of: Callable[..., Any]) -> None:
    async with gateway_of([ScriptedWorker()]) as it:
        for session_id in ("x" * 257, "with blank", "fine"):
            await it.http.post(PATH, json=chat("a"), headers={"X-Session-ID": session_id})
        assert list(it.gateway.pool._homes) == ["fine"]


async def test_a_worker_whose_name_is_none(gateway_of: Callable[..., Any]) -> None:
    async with gateway_of([]) as it:
        assert (await it.http.post("/workers", json={"url": "http://a..b:80"})).status_code == 201
        await it.until(lambda: it.gateway.pool.states()["offline"] == 1)
        assert (await it.http.post(PATH, json=chat("a"))).json()["error"]["code"] == "no_worker"
