"""The tests of sessions notice the faults that they are for: each fault is planted here, and its test must fail.

The faults are those of a public demo's gateway. Most are guarded twice (the gateway forgets, and the worker's epoch
would refuse), so some are planted on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway import conftest, scripted, test_sessions
from tests.gateway.conftest import running
from weft.gateway import routing
from weft.gateway.pool import Pool, Ticket
from weft.gateway.routing import Choice, Wanted
from weft.gateway.sessions import SessionSocket
from weft.gateway.turn import Turn, TurnError
from weft.gateway.workers import Place, Worker

Patch = pytest.MonkeyPatch


def epochs_are_not_asked(patch: Patch) -> None:
    """Whatever a place is said to hold is taken for true."""
    hear = Turn._tell_worker

    async def tell(turn: Turn, frame: dict[str, Any]) -> None:
        await hear(turn, {**frame, "epoch": None} if frame["type"] == "prefill" else frame)

    patch.setattr(Turn, "_tell_worker", tell)


def a_place_keeps_its_history_in_use(patch: Patch) -> None:
    patch.setattr(Place, "clear", lambda place: None)
    epochs_are_not_asked(patch)


def a_turn_is_kept_that_did_not_end(patch: Patch) -> None:
    """The worker keeps a broken turn's messages, and the gateway appends the retry to them."""
    prefill = scripted._Turn.prefill

    async def commits(turn: scripted._Turn, frame: dict[str, Any]) -> None:
        await prefill(turn, frame)
        turn.worker.sessions[turn.session_id] = {"messages": turn.messages, "epoch": "any"}

    patch.setattr(scripted._Turn, "prefill", commits)
    a_place_keeps_its_history_in_use(patch)


def stop_is_not_read_while_generating(patch: Patch) -> None:
    async def deaf(turn: Turn) -> bool:
        return False

    patch.setattr(Turn, "stop", deaf)


def a_dead_worker_ends_the_turn(patch: Patch) -> None:
    on_worker = Turn._on_worker

    async def gives_up(turn: Turn, lease: Any) -> Any:
        try:
            return await on_worker(turn, lease)
        except Exception as error:
            raise TurnError({"type": "error", "code": "broken", "message": str(error)}) from None

    patch.setattr(Turn, "_on_worker", gives_up)


def a_second_prefill_takes_another_place(patch: Patch) -> None:
    prefill = SessionSocket._prefill

    def replaces(socket: SessionSocket, frame: dict[str, Any], size: int) -> None:
        socket.turn = None
        prefill(socket, frame, size)

    patch.setattr(SessionSocket, "_prefill", replaces)


def a_health_answer_makes_a_worker_idle(patch: Patch) -> None:
    heard = Worker.heard

    def idle(worker: Worker, facts: dict[str, Any]) -> None:
        heard(worker, facts)
        worker.in_flight = worker.turns = 0

    patch.setattr(Worker, "heard", idle)


def a_cancelled_ticket_is_only_dropped(patch: Patch) -> None:
    def drops(pool: Pool, ticket_id: str) -> None:
        pool.ticket(ticket_id)
        del pool._line[ticket_id]
        pool._renumber()

    patch.setattr(Pool, "cancel", drops)


def whoever_leaves_the_line_stays_in_it(patch: Patch) -> None:
    def stays(pool: Pool, ticket: Ticket) -> None:
        return None

    patch.setattr(Pool, "leave", stays)


def old_caches_go_before_empty_places(patch: Patch) -> None:
    place_for = routing._place_for

    def lru_first(wanted: Wanted, workers: list[Worker]) -> Choice | None:
        choice = place_for(wanted, workers)
        if choice is not None and choice.reason == "empty":
            for worker in workers:
                if (place := worker.oldest_place()) is not None:
                    return Choice(worker, "lru", place)
        return choice

    patch.setattr(routing, "_place_for", lru_first)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (a_place_keeps_its_history_in_use, test_sessions.test_b_takes_the_workers_only_place_and_vanishes),
        (a_turn_is_kept_that_did_not_end, test_sessions.test_a_retry_after_a_disconnect_holds_the_message_once),
        (epochs_are_not_asked, test_sessions.test_a_place_with_a_stale_history_is_found_out),
        (stop_is_not_read_while_generating, test_sessions.test_stop_while_generating),
        (a_dead_worker_ends_the_turn, test_sessions.test_a_worker_that_dies_in_the_middle),
        (a_second_prefill_takes_another_place, test_sessions.test_a_second_prefill_without_generate),
        (a_health_answer_makes_a_worker_idle, test_sessions.test_slow_health_and_a_disconnect),
        (a_cancelled_ticket_is_only_dropped, test_sessions.test_the_line_moves),
        (whoever_leaves_the_line_stays_in_it, test_sessions.test_the_line_moves),
        (old_caches_go_before_empty_places, test_sessions.test_four_levels_in_their_order),
    ],
    ids=lambda value: value.__name__,
)
async def test_the_fault_is_noticed(
    monkeypatch: Patch, fault: Callable[[Patch], None], test: Callable[..., Awaitable[None]]
) -> None:
    monkeypatch.setattr(conftest, "PATIENCE_S", 1.0)  # what never comes is waited for
    fault(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, KeyError)):
        async with asyncio.timeout(20):
            await test(running)
