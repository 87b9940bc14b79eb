"""Sessions through the gateway, against scripted workers: the faults of the public demo, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.gateway.conftest import Client, user
from tests.gateway.scripted import ScriptedWorker, answer_to


async def test_two_turns_on_one_worker(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [user("a")]
        expected = answer_to(messages)
        text, route = await client.turn(messages)
        assert text == expected and route["reason"] == "empty"
        messages.append(user("b"))
        expected = answer_to(messages)
        text, route = await client.turn(messages)
        assert text == expected and route["reason"] == "hit"
        sent = [entry for entry in worker.log if entry.get("type") == "prefill"]
        assert [len(entry["messages"]) for entry in sent] == [1, 1]  # on the hit only what is new
        assert it.gateway.pool.route_counts == {"empty": 1, "hit": 1}
        assert it.gateway.pool.leases == {}


async def test_b_takes_the_workers_only_place_and_vanishes(gateway_of: Callable[..., Any]) -> None:
    """A's next turn neither sees B's text nor takes the place for its own."""
    worker = ScriptedWorker(slots=1, session_slots=1)
    async with gateway_of([worker]) as it:
        a, b = await it.client("a"), await it.client("b")
        messages = [user("I am A")]
        await a.turn(messages)
        worker.hold(2)
        await b.send("prefill", messages=[user("I am B")])
        assert (await b.next("queue_done"))["route"]["reason"] == "lru"
        await b.next("prefill_done")
        await b.send("generate")
        await b.next("chunk")
        await b.vanish()
        worker.steps = None
        messages.append(user("who am I?"))
        expected = answer_to(messages)
        text, route = await a.turn(messages)
        assert text == expected
        assert route["reason"] == "empty"
        assert [e["messages"][0]["content"] for e in worker.log if e.get("type") == "prefill"][-1] == "I am A"


async def test_a_place_with_a_stale_history_is_found_out(gateway_of: Callable[..., Any]) -> None:
    """A worker that was restarted between two health checks has forgotten everything: its epoch says so."""
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [user("a")]
        await client.turn(messages)
        await worker.die()
        await worker.live_again()
        messages.append(user("b"))
        expected = answer_to(messages)
        text, route = await client.turn(messages)
        assert text == expected
        assert it.gateway.pool.route_counts["hit"] == 0
        sent = [entry for entry in worker.log if entry.get("type") == "prefill"]
        assert [len(entry["messages"]) for entry in sent] == [1, 1, 3]  # refused as epoch_mismatch, then all of it
        assert route["reason"] == "hit" and it.gateway.pool.route_counts["stale"] == 1


async def test_a_health_check_that_sees_a_new_process_forgets_its_places(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [user("a")]
        await client.turn(messages)
        worker.boot_id = "another"
        record = it.gateway.pool.workers["w1"]
        it.gateway.pool.check_now(record)
        await it.until(lambda: record.boot_id == "another")
        messages.append(user("b"))
        _, route = await client.turn(messages)
        assert route["reason"] == "empty"


async def test_a_retry_after_a_disconnect_holds_the_message_once(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [user("a")]
        await client.turn(messages)
        messages.append(user("b"))
        expected = answer_to(messages)
        worker.hold(2)
        await client.prefill(messages)
        await client.send("generate")
        await client.next("chunk")
        await client.vanish()
        worker.steps = None
        await it.until(lambda: not it.gateway.pool.leases)
        text, _ = await (await it.client()).turn(messages)
        assert text == expected


async def test_stop_while_generating(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [user("a")]
        worker.hold(2)
        await client.prefill(messages)
        await client.send("generate")
        first = await client.next("chunk")
        second = await client.next("chunk")
        await client.send("stop")
        frames = [await client.next()]
        while frames[-1]["type"] != "done":
            frames.append(await client.next())
        assert [frame["type"] for frame in frames] == ["chunk", "done"] and frames[0]["text_delta"] is None
        assert frames[-1]["stopped"] is True
        worker.steps = None
        messages += [{"role": "assistant", "content": first["text_delta"] + second["text_delta"]}, user("b")]
        expected = answer_to(messages)
        text, route = await client.turn(messages)
        assert text == expected and route["reason"] == "hit"  # what was kept is what the client was sent


async def test_stop_over_http(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    worker.hold(1)
    async with gateway_of([worker]) as it:
        client = await it.client("mine")
        await client.prefill([user("a")])
        await client.send("generate")
        await client.next("chunk")
        answer = await it.http.post("/streaming/stop", json={"session_id": "nobody's"})
        assert answer.status_code == 404
        answer = await it.http.post("/streaming/stop", json={"session_id": "mine"})
        assert answer.json() == {"stopped": 1}
        assert (await client.next("done"))["stopped"] is True


async def test_a_worker_that_dies_in_the_middle(gateway_of: Callable[..., Any]) -> None:
    """The answer goes on on another one; the client sees one text, and the dead worker is out at once."""
    first, second = ScriptedWorker(), ScriptedWorker()
    first.hold(3)
    async with gateway_of([first, second]) as it:
        client = await it.client()
        messages = [user("a")]
        expected = answer_to(messages)
        done_prefill = await client.prefill(messages)
        assert done_prefill["message_count"] == 1
        await client.send("generate", return_token_ids=True)
        indices, text, ids = [], "", []
        for _ in range(3):
            frame = await client.next("chunk")
            indices.append(frame["chunk_index"])
            text += frame["text_delta"]
            ids += frame["token_ids"]
        await first.die()
        while (frame := await client.next())["type"] == "chunk":
            indices.append(frame["chunk_index"])
            text += frame["text_delta"] or ""
            ids += frame["token_ids"]
        assert frame["type"] == "done", frame
        assert text == expected and ids == list(range(6)) and frame["moves"] == 1
        assert indices == list(range(7))
        await it.until(lambda: it.gateway.pool.states()["offline"] == 1)
        messages += [{"role": "assistant", "content": text}, user("b")]
        _, route = await client.turn(messages)
        assert route == {"worker": "w2", "reason": "hit"}


async def test_a_worker_that_dies_between_prefill_and_generate(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    async with gateway_of([first, second]) as it:
        client = await it.client()
        messages = [user("a")]
        await client.prefill(messages)
        await first.die()
        text, _ = await client.answer()
        assert text == answer_to(messages)
        assert it.gateway.pool.leases == {}


async def test_the_last_worker_dies(gateway_of: Callable[..., Any]) -> None:
    """A clean error; and when it lives again, so does everything."""
    worker = ScriptedWorker()
    worker.hold(1)
    async with gateway_of([worker], health_interval_s=0.1) as it:
        client = await it.client()
        await client.prefill([user("a")])
        await client.send("generate")
        await client.next("chunk")
        await worker.die()
        frame = await client.next()
        assert frame["type"] == "error" and frame["code"] == "no_worker"
        await client.send("prefill", messages=[user("a")])
        assert (await client.next())["code"] == "no_worker"
        worker.steps = None
        await worker.live_again()
        await it.until(it.usable)
        text, _ = await client.turn([user("a")])
        assert text == answer_to([user("a")])
        assert it.gateway.pool.leases == {}


async def test_a_second_prefill_without_generate(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(slots=1, session_slots=1)
    async with gateway_of([worker]) as it:
        client = await it.client()
        await client.prefill([user("a")])
        await client.send("prefill", messages=[user("x")])
        frame = await client.next()
        assert (frame["type"], frame["code"]) == ("error", "double_prefill")
        text, _ = await client.answer()
        assert text == answer_to([user("a")])
        for _ in range(3):  # the worker's only slot was not lost
            await (await it.client()).turn([user("b")])


async def test_wrong_frames_are_answered(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        cases = [
            ("{", "invalid_json"),
            ("[]", "invalid_json"),
            (b"\x00", "invalid_json"),
            ("{}", "unknown_type"),
            ('{"type": "dance"}', "unknown_type"),
            ('{"type": "generate"}', "wrong_order"),
            ('{"type": "prefill", "messages": 3}', None),
            ('{"type": "prefill", "messages": []}', None),
            ('{"type": "prefill", "messages": [], "cache": 1}', "unknown_parameter"),
            ('{"type": "prefill", "messages": [], "is_last_chunk": 1}', None),
        ]
        for text, code in cases:
            await client.ws.send(text)
            frame = await client.next()
            assert frame["type"] == "error" and frame["message"], text
            if code is not None:
                assert frame["code"] == code
        await client.send("stop")  # with nothing to stop, it is no error
        text, _ = await client.turn([user("a")])
        assert text == answer_to([user("a")])


async def test_messages_in_several_parts(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        system = {"role": "system", "content": "s"}
        part = await client.prefill([system], is_last_chunk=False)
        assert part["message_count"] == 1 and part["input_tokens"] == 0
        assert (await client.prefill([user("a")]))["message_count"] == 2
        assert (await client.answer())[0] == answer_to([system, user("a")])


async def test_slow_health_and_a_disconnect(gateway_of: Callable[..., Any]) -> None:
    """A health answer that comes late cannot free, or take, what it knows nothing of."""
    worker = ScriptedWorker(slots=1, session_slots=1)
    async with gateway_of([worker]) as it:
        record = it.gateway.pool.workers["w1"]
        worker.health_gate = asyncio.Event()
        it.gateway.pool.check_now(record)
        checks = sum(entry.get("type") == "health" for entry in worker.log)
        await it.until(lambda: sum(entry.get("type") == "health" for entry in worker.log) > checks - 1)
        worker.hold(1)
        client = await it.client()
        await client.prefill([user("a")])
        await client.send("generate")
        await client.next("chunk")
        await client.vanish()
        await it.until(lambda: not it.gateway.pool.leases)
        waiting = await it.client()
        worker.steps = None
        await waiting.send("prefill", messages=[user("b")])
        await waiting.next("prefill_done")
        worker.wait_s = 7.0
        worker.health_gate.set()
        await it.until(lambda: record.wait_s == 7.0)
        assert record.in_flight == 1  # the late answer did not make it idle
        assert (await waiting.answer())[0] == answer_to([user("b")])
        assert record.in_flight == 0


async def test_the_line_moves(gateway_of: Callable[..., Any]) -> None:
    """Positions fall as those ahead leave: by being served, by vanishing, by a cancelled ticket."""
    worker = ScriptedWorker(slots=1, session_slots=1)
    async with gateway_of([worker]) as it:
        first = await it.client("first")
        await first.prefill([user("1")])
        line = []
        for number in range(4):
            client = await it.client(f"waiting{number}")
            await client.send("prefill", messages=[user(f"w{number}")])
            frame = await client.next("queued")
            assert frame["position"] == frame["queue_length"] == number + 1
            assert frame["estimated_wait_s"] > 0
            line.append((client, frame["ticket_id"]))
        shown = (await it.http.get("/api/queue")).json()
        assert [ticket["ticket_id"] for ticket in shown["tickets"]] == [ticket for _, ticket in line]
        assert shown["queue_length"] == 4 and shown["running"] == 1
        await line[0][0].vanish()
        assert (await line[3][0].next("queue_update"))["position"] == 3
        assert (await it.http.get(f"/api/queue/{line[3][1]}")).json()["position"] == 3
        answer = await it.http.delete(f"/api/queue/{line[1][1]}")
        assert answer.status_code == 200
        cancelled = await line[1][0].next()
        while cancelled["type"] == "queue_update":
            cancelled = await line[1][0].next()
        assert (cancelled["type"], cancelled["code"]) == ("error", "cancelled")
        assert (await it.http.delete(f"/api/queue/{line[1][1]}")).status_code == 404
        assert (await line[3][0].next("queue_update"))["position"] == 2
        await line[2][0].send("stop")  # leaves the line, too
        while (frame := await line[2][0].next())["type"] == "queue_update":
            pass
        assert frame["code"] == "cancelled"
        await first.answer()
        await line[3][0].next("queue_done")
        await line[3][0].next("prefill_done")
        assert (await line[3][0].answer())[0] == answer_to([user("w3")])
        assert (await it.http.get("/api/queue")).json()["queue_length"] == 0
        again, _ = await line[1][0].turn([user("again")])  # whose ticket was cancelled, its connection was not
        assert again == answer_to([user("again")])


async def test_a_full_line(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(slots=1, session_slots=1)
    async with gateway_of([worker], max_queue_size=1) as it:
        first, second, third = [await it.client(name) for name in "abc"]
        await first.prefill([user("1")])
        await second.send("prefill", messages=[user("2")])
        await second.next("queued")
        await third.send("prefill", messages=[user("3")])
        frame = await third.next()
        assert frame["code"] == "queue_full" and frame["retry_after_s"] > 0
        answer = await it.http.post("/v1/chat/completions", json={"messages": [user("x")]})
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        await first.answer()
        await second.next("prefill_done")
        await second.answer()


async def test_four_levels_in_their_order(gateway_of: Callable[..., Any]) -> None:
    """Three workers with one place each: the history's own, an empty one, the one used longest ago, then the line."""
    workers = [ScriptedWorker(slots=1, session_slots=1) for _ in range(3)]
    async with gateway_of(workers) as it:
        talks = {name: [user(name)] for name in "abcd"}
        clients = {name: await it.client(name) for name in talks}

        async def turn(name: str) -> tuple[str, str]:
            _, route = await clients[name].turn(talks[name])
            talks[name].append(user(f"{name} again"))
            return route["worker"], route["reason"]

        assert await turn("a") == ("w1", "empty")
        assert await turn("b") == ("w2", "empty")  # a request without history prefers a worker without cache
        assert await turn("b") == ("w2", "hit")
        assert await turn("a") == ("w1", "hit")
        assert await turn("c") == ("w3", "empty")
        assert await turn("d") == ("w2", "lru")  # b was served longest ago
        assert await turn("a") == ("w1", "hit")
        assert await turn("b") == ("w3", "lru")
        for name in "abd":
            await clients[name].prefill(talks[name])
        await clients["c"].send("prefill", messages=talks["c"])
        assert (await clients["c"].next())["type"] == "queued"
        await clients["d"].answer()
        assert (await clients["c"].next("queue_done"))["route"] == {"worker": "w2", "reason": "lru"}


async def test_a_hit_is_only_for_workers_with_room(gateway_of: Callable[..., Any]) -> None:
    workers = [ScriptedWorker(slots=1, session_slots=1), ScriptedWorker(slots=1, session_slots=1)]
    async with gateway_of(workers) as it:
        a, other = await it.client("a"), await it.client("other")
        messages = [user("a")]
        _, route = await a.turn(messages)
        assert route["worker"] == "w1"
        messages.append(user("b"))
        copy = list(messages)
        await a.prefill(messages)
        await other.send("prefill", messages=copy)  # the same history; its place is in use
        assert (await other.next("queue_done"))["route"] == {"worker": "w2", "reason": "empty"}


async def test_histories_that_say_more_than_role_and_content_never_hit(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [{"role": "user", "content": "a", "name": "Ann"}]
        await client.turn(messages)
        messages.append(user("b"))
        _, route = await client.turn(messages)
        assert route["reason"] == "empty"


async def test_clearing_is_a_miss(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client()
        messages = [user("a")]
        await client.turn(messages)
        messages.append(user("b"))
        assert (await client.prefill(messages, clear_kv_cache=True))["cached_tokens"] == 0
        assert (await client.answer())[0] == answer_to(messages)


async def test_a_silent_turn_gives_its_place_back(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(slots=1, session_slots=1)
    async with gateway_of([worker], worker_lease_s=1.0) as it:
        client = await it.client()
        await client.prefill([user("a")])
        frame = await client.next()
        assert (frame["type"], frame["code"]) == ("error", "lease_expired")
        assert it.gateway.pool.leases == {}
        assert (await client.turn([user("b")]))[0] == answer_to([user("b")])


async def test_ending_a_session_by_the_clients_own_id(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    async with gateway_of([worker]) as it:
        client = await it.client("mine")
        messages = [user("a")]
        await client.turn(messages)
        assert len(worker.sessions) == 1
        assert (await it.http.delete("/v1/sessions/mine")).json() == {"id": "mine", "ended": True, "aborted": 0}
        assert not worker.sessions
        assert (await it.http.delete("/v1/sessions/mine")).status_code == 404
        messages.append(user("b"))
        _, route = await client.turn(messages)
        assert route["reason"] == "empty"


async def test_keys_and_origins_of_websockets(gateway_of: Callable[..., Any]) -> None:
    """As on a worker: a header or a subprotocol; and no page of another server."""
    async with gateway_of([ScriptedWorker()], http_api_keys=("secret",)) as it:
        url = f"ws{it.url[4:]}/ws/streaming/s"
        for headers, protocols, status in (
            ({}, None, 401),
            ({"Authorization": "Bearer wrong"}, None, 401),
            ({}, ["weft", "weft-api-key.wrong"], 401),
            ({"Authorization": "Bearer secret", "Origin": "http://evil.example"}, None, 403),
        ):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers=headers, subprotocols=protocols, proxy=None)
            assert refused.value.response.status_code == status
        own = {"Authorization": "Bearer secret", "Origin": it.url}
        for headers, protocols in ((own, None), ({}, ["weft", "weft-api-key.secret"])):
            async with connect(url, additional_headers=headers, subprotocols=protocols, proxy=None) as ws:
                assert (await Client(ws).turn([user("a")]))[0] == answer_to([user("a")])
                assert ws.subprotocol == ("weft" if protocols else None)


async def test_draining_waits_for_turns(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker()
    worker.hold(1)
    async with gateway_of([worker]) as it:
        idle, busy = await it.client("idle"), await it.client("busy")
        await busy.prefill([user("a")])
        await busy.send("generate")
        await busy.next("chunk")
        draining = asyncio.create_task(it.gateway.drain())
        await idle.ws.wait_closed()
        assert idle.ws.close_code == 1001 and not draining.done()
        await busy.send("prefill", messages=[user("b")])
        worker.go(5)
        text, done = await busy.rest() if (await busy.next())["type"] == "error" else ("", {})
        assert done["stopped"] is False
        await draining
        await busy.ws.wait_closed()
        assert busy.ws.close_code == 1001


async def test_prefills_without_end_are_bounded(gateway_of: Callable[..., Any]) -> None:
    async with gateway_of([ScriptedWorker()], http_max_body_bytes=2000) as it:
        client = await it.client()
        await client.prefill([user("x" * 1500)], is_last_chunk=False)
        await client.send("prefill", messages=[user("x" * 1500)], is_last_chunk=False)
        assert (await client.next())["code"] == "body_too_large"
        assert (await client.turn([user("a")]))[0] == answer_to([user("a")])


async def test_a_worker_that_is_still_ending_the_turn_before(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(session_slots=1)
    async with gateway_of([worker]) as it:
        worker.busy_answers = 3
        assert (await (await it.client()).turn([user("a")]))[0] == answer_to([user("a")])
        assert it.gateway.pool.workers["w1"].failures_total == it.gateway.pool.retries == 0


async def test_a_worker_that_breaks_off_between_its_last_chunk_and_done(gateway_of: Callable[..., Any]) -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    first.breaks_off_at_the_end = True
    async with gateway_of([first, second]) as it:
        client = await it.client()
        await client.prefill([user("a")])
        await client.send("generate")
        chunks = []
        while (frame := await client.next())["type"] == "chunk":
            chunks.append(frame)
        assert frame["type"] == "done", frame
        assert "".join(chunk["text_delta"] or "" for chunk in chunks) == answer_to([user("a")])
        assert [chunk["is_final"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert [chunk["chunk_index"] for chunk in chunks] == list(range(len(chunks)))


async def test_a_place_that_has_gone_to_somebody_else_is_not_ended(gateway_of: Callable[..., Any]) -> None:
    worker = ScriptedWorker(session_slots=1)
    async with gateway_of([worker]) as it:
        alice, bob = await it.client("alice"), await it.client("bob")
        await alice.turn([user("a")])
        messages = [user("b")]
        await bob.turn(messages)
        assert (await it.http.delete("/v1/sessions/alice")).status_code == 404
        messages.append(user("c"))
        assert (await bob.turn(messages))[1]["reason"] == "hit"
        await it.http.delete("/workers/w1")
        assert (await it.http.delete("/v1/sessions/bob")).status_code == 404


async def test_a_client_that_goes_at_the_moment_of_its_lease(gateway_of: Callable[..., Any]) -> None:
    """Its turn has been given a place and has not woken up yet: the place goes on to the next."""
    worker = ScriptedWorker(session_slots=1)
    async with gateway_of([worker]) as it:
        first, second = await it.client("first"), await it.client("second")
        await first.prefill([user("1")])
        await second.send("prefill", messages=[user("2")])
        await second.next("queued")
        pool = it.gateway.pool
        waiting = next(socket for socket in it.gateway.sessions._open if socket.session_id == "second")
        for lease in list(pool.leases):
            lease.release(ok=False)
        assert waiting._task is not None
        waiting._task.cancel()
        await it.until(lambda: not pool.leases)
        assert (await (await it.client("third")).turn([user("3")]))[0] == answer_to([user("3")])


async def test_stop_while_an_answer_moves(gateway_of: Callable[..., Any]) -> None:
    """Its worker has died, and the only other one is full: it waits, is stopped, and ends as a stopped answer does."""
    first, second = ScriptedWorker(session_slots=1), ScriptedWorker(session_slots=1)
    first.hold(2)
    async with gateway_of([first, second]) as it:
        moved, other = await it.client("moved"), await it.client("other")
        await moved.prefill([user("a")])
        await other.prefill([user("b")])
        await moved.send("generate")
        text = (await moved.next("chunk"))["text_delta"] + (await moved.next("chunk"))["text_delta"]
        await first.die()
        await it.until(lambda: it.gateway.pool.tickets)
        await moved.send("stop")
        await other.answer()
        rest, done = await moved.rest()
        assert done["stopped"] is True and answer_to([user("a")]).startswith(text + rest)
