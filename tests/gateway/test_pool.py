"""The pool by itself, on a clock of its own: routing's ties, the line, leases, and a random walk over all of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.errors import CancelledError, NotFoundError, QueueFullError, UnavailableError
from weft.gateway.pool import Lease, Pool, Ticket
from weft.gateway.routing import Wanted
from weft.gateway.workers import FIRST_REST_S, Worker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def facts(**fields: Any) -> dict[str, Any]:
    slots, sessions = fields.pop("slots", 2), fields.pop("sessions", 2)
    return {
        "boot_id": "b",
        "model": "m",
        "ready": True,
        "draining": False,
        "requests": {"total": slots, "used": 0},
        "sessions": {"total": sessions, "used": 0},
        "queued": 0,
        "wait_s": 0.0,
        "prefill_tokens_per_s": 1000.0,
        "tokens_per_char": 0.25,
        "prefixes": [],
    } | fields


def new_pool(*workers: dict[str, Any], **fields: Any) -> tuple[Pool, Clock]:
    clock = Clock()
    pool = Pool(clock, **({"max_queue_size": 100, "lease_s": 300.0, "alpha": 0.5} | fields))
    for worker in workers:
        pool.heard(pool.add("http://x:1"), facts(**worker))
    return pool, clock


def turn(history: str | None = None) -> Wanted:
    return Wanted("streaming", turn=True, history=history)


def plain(length: int = 100, **fields: Any) -> Wanted:
    return Wanted("chat", length=length, **fields)


def lease_of(pool: Pool, wanted: Wanted) -> Lease:
    return pool.enter(wanted).lease.result()


def done(lease: Lease, history: str) -> None:
    lease.keep(history, "epoch", 10)
    lease.release(ok=True)


@pytest.fixture(autouse=True)
async def loop() -> None:
    """Tickets hold futures, which need a running loop."""


# ---- routing ----------------------------------------------------------------------------------------------------


async def test_the_last_used_of_several_hits() -> None:
    pool, clock = new_pool({}, {})
    one, other = lease_of(pool, turn()), lease_of(pool, turn())
    assert {one.worker.name, other.worker.name} == {"w1", "w2"}
    done(one, "h")
    clock.now_s += 1
    done(other, "h")
    again = lease_of(pool, turn("h"))
    assert (again.reason, again.worker, again.epoch) == ("hit", other.worker, "epoch")


async def test_an_assigned_place_has_no_history() -> None:
    pool, _ = new_pool({})
    done(lease_of(pool, turn()), "h")
    again = lease_of(pool, turn("h"))
    assert again.place is not None and again.place.history is None
    again.release(ok=False)  # not a clean end
    assert lease_of(pool, turn("h")).reason == "empty"


async def test_empty_workers_come_before_those_with_histories_then_the_least_loaded() -> None:
    pool, _ = new_pool({"sessions": 9}, {"sessions": 9}, {"sessions": 9})
    done(lease_of(pool, turn()), "a")
    assert lease_of(pool, turn()).worker.name == "w2"
    assert lease_of(pool, turn()).worker.name == "w3"
    assert lease_of(pool, turn()).worker.name == "w2"  # no history still, and one of two slots


async def test_the_place_used_longest_ago_gives_way() -> None:
    pool, clock = new_pool({"sessions": 1}, {"sessions": 1})
    for name in "ab":
        done(lease_of(pool, turn()), name)
        clock.now_s += 1
    assert (third := lease_of(pool, turn("c"))).reason == "lru" and third.worker.name == "w1"


async def test_cost_weighs_the_cache_against_waiting() -> None:
    pool, _ = new_pool({"prefixes": ["d2"]}, {})
    digests = [("d1", 4000), ("d2", 40_000)]
    one = lease_of(pool, plain(40_000, digests=digests))
    assert (one.reason, one.worker.name, one.choice.known) == ("prefix", "w1", 40_000)
    pool, _ = new_pool({"prefixes": ["d1"], "wait_s": 20.0}, {})
    one = lease_of(pool, plain(40_000, digests=digests))
    assert (one.reason, one.worker.name) == ("load", "w2")  # 10 s of computing are less than 20 s of waiting


async def test_what_is_on_its_way_counts_until_the_report() -> None:
    pool, _ = new_pool({}, {})
    digests = [("d", 100_000)]
    first = lease_of(pool, plain(100_000, digests=digests))
    first.begun()
    second = lease_of(pool, plain(100_000, digests=digests))
    assert second.worker is first.worker and second.reason == "prefix"
    pool.heard(first.worker, facts())  # it does not hold it, as it says itself
    assert first.worker.known_length(digests) == 0


async def test_prompts_not_begun_are_waiting_time() -> None:
    pool, _ = new_pool({}, {})
    assert lease_of(pool, plain(100_000)).worker.name == "w1"
    assert lease_of(pool, plain(10)).worker.name == "w2"
    assert lease_of(pool, plain(10)).worker.name == "w2"  # w1 has 25 s of computing before it


async def test_a_session_goes_home_while_there_is_room() -> None:
    pool, _ = new_pool({"slots": 1}, {"slots": 1})
    first = lease_of(pool, plain(session="s"))
    first.release(ok=True)
    again = lease_of(pool, plain(session="s"))
    assert (again.worker, again.reason) == (first.worker, "session")
    assert lease_of(pool, plain(session="s")).worker is not first.worker


async def test_whoever_failed_is_avoided_but_not_shunned() -> None:
    pool, _ = new_pool({}, {})
    assert lease_of(pool, plain(avoid={"w1"})).worker.name == "w2"
    assert lease_of(pool, plain(avoid={"w1", "w2"})).worker.name in ("w1", "w2")


# ---- the line, leases, failures ---------------------------------------------------------------------------------


async def test_first_come_first_served() -> None:
    pool, _ = new_pool({"slots": 1})
    first = lease_of(pool, plain())
    tickets = [pool.enter(plain()) for _ in range(3)]
    assert [ticket.position for ticket in tickets] == [1, 2, 3]
    pool.leave(tickets[1])
    assert [ticket.position for ticket in pool.tickets] == [1, 2]
    first.release(ok=True)
    assert tickets[0].lease.done() and not tickets[2].lease.done() and tickets[2].position == 1


async def test_whoever_had_a_place_already_goes_first() -> None:
    pool, _ = new_pool({"slots": 1})
    lease_of(pool, plain())
    waiting = pool.enter(plain())
    again = pool.enter(plain(), first=True)
    assert [again.position, waiting.position] == [1, 2]


async def test_the_bound_of_the_line() -> None:
    pool, _ = new_pool({"slots": 1}, max_queue_size=1)
    lease_of(pool, plain())
    pool.enter(plain())
    with pytest.raises(QueueFullError):
        pool.enter(plain())
    pool.enter(plain(), first=True)  # what has begun is not refused


async def test_a_cancelled_ticket() -> None:
    pool, _ = new_pool({"slots": 1})
    lease_of(pool, plain())
    ticket = pool.enter(plain())
    pool.cancel(ticket.id)
    with pytest.raises(CancelledError):
        ticket.lease.result()
    with pytest.raises(NotFoundError):
        pool.cancel(ticket.id)


async def test_leaving_at_the_moment_of_being_served() -> None:
    """The lease has come, its owner has gone before taking it: it goes to the next."""
    pool, _ = new_pool({"slots": 1})
    first = lease_of(pool, plain())
    gone, next_one = pool.enter(plain()), pool.enter(plain())
    first.release(ok=True)
    assert gone.lease.done()
    pool.leave(gone)
    assert next_one.lease.done()


async def test_an_owner_that_is_being_cancelled_harms_nobody() -> None:
    """Its future is cancelled before it leaves the line: the place goes to the next one, and no error to others."""
    pool, _ = new_pool({"slots": 1})
    first = lease_of(pool, plain())
    cancelled, next_one = pool.enter(plain()), pool.enter(plain())
    cancelled.lease.cancel()
    first.release(ok=True)
    assert next_one.lease.done()
    pool.leave(cancelled)
    last = pool.enter(plain())
    last.lease.cancel()
    pool.fail_all(UnavailableError("no more"))
    assert pool.tickets == []


async def test_estimates_are_made_once_for_many_who_ask() -> None:
    pool, clock = new_pool({"slots": 1})
    lease_of(pool, plain())
    for _ in range(3):
        pool.enter(plain())
    made = 0
    estimates = pool.estimates

    def counting() -> list[float]:
        nonlocal made
        made += 1
        return estimates()

    pool.estimates = counting  # type: ignore[method-assign]
    waits = [pool.estimate(position) for position in (1, 2, 3)]
    assert made == 1 and waits == [(wait, 3) for wait in estimates()]
    pool.enter(plain())
    assert pool.estimate(4)[1] == 4 and made == 2  # one more than was estimated
    clock.now_s += 1
    pool.estimate(1)
    assert made == 3


async def test_estimates_follow_the_averages() -> None:
    pool, clock = new_pool({"slots": 2})
    for seconds in (10.0, 20.0):
        lease = lease_of(pool, plain())
        clock.now_s += seconds
        lease.release(ok=True)
    failed = lease_of(pool, plain())
    clock.now_s += 1000
    failed.release(ok=False)
    assert pool.times.expected_s("chat") == 15.0  # alpha one half; what failed does not count
    lease_of(pool, plain())
    clock.now_s += 5
    lease_of(pool, plain())
    for _ in range(3):
        pool.enter(plain())
    assert pool.estimates() == [10.0, 15.0, 25.0]


async def test_a_silent_lease_is_taken_back() -> None:
    pool, clock = new_pool({"slots": 1}, lease_s=10.0)
    expired: list[str] = []
    lease = lease_of(pool, plain())
    lease.on_expire = lambda: expired.append("lease")
    waiting = pool.enter(plain())
    clock.now_s += 9
    lease.touch()
    clock.now_s += 9
    pool.expire()
    assert not expired
    clock.now_s += 1
    pool.expire()
    assert expired and waiting.lease.done()
    lease.release(ok=True)  # its holder is late, and nothing happens twice
    assert pool.workers["w1"].in_flight == 1


async def test_states() -> None:
    pool, clock = new_pool()
    worker = pool.add("http://x:1")
    now = clock
    assert worker.state(now()) == "loading"
    pool.heard(worker, facts(ready=False))
    assert worker.state(now()) == "loading"
    pool.heard(worker, facts())
    assert worker.state(now()) == "idle"
    lease = lease_of(pool, plain())
    assert worker.state(now()) == "busy"
    pool.missed(worker, "slow", refused=False)
    assert worker.state(now()) == "busy"  # one late answer is none yet
    pool.missed(worker, "slow", refused=False)
    assert worker.state(now()) == "error"
    pool.heard(worker, facts(draining=True))
    assert worker.state(now()) == "draining"
    pool.missed(worker, "refused", refused=True)
    assert worker.state(now()) == "offline"
    lease.release(ok=False)
    pool.heard(worker, facts())
    assert worker.state(now()) == "idle" and pool.states()["idle"] == 1


async def test_nobody_waits_for_nothing() -> None:
    pool, _ = new_pool({"slots": 1})
    lease_of(pool, plain())
    waiting = pool.enter(plain())
    pool.missed(pool.workers["w1"], "dead", refused=True)
    with pytest.raises(UnavailableError):
        waiting.lease.result()
    with pytest.raises(UnavailableError):
        pool.enter(plain())
    pool.add("http://x:2", starting=True)
    assert not pool.enter(plain()).lease.done()  # one is on its way


async def test_rests_grow_and_end() -> None:
    pool, clock = new_pool({}, {})
    worker = pool.workers["w1"]
    rests = []
    for _ in range(5):
        lease = lease_of(pool, plain(avoid={"w2"}))
        assert lease.worker is worker
        lease.release(ok=False)
        pool.failed(lease, "bad", lost=False)
        rests.append(max(0.0, worker.rests_until_s - clock()))
        clock.now_s = max(clock(), worker.rests_until_s)
    assert rests == [0.0, 0.0, FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert worker.room(clock(), turn=False) == 1
    lease_of(pool, plain(avoid={"w2"})).release(ok=True)
    assert worker.room(clock(), turn=False) == worker.slots


# ---- everything at once -----------------------------------------------------------------------------------------


class PoolWalk(RuleBasedStateMachine):
    """Whatever happens: nobody overtakes, nothing is lost, no room lies idle while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.pool, self.clock = None, Clock()  # type: ignore[assignment]
        self.waiting: list[Ticket] = []
        self.leases: list[Lease] = []
        self.boots = 0

    def teardown(self) -> None:
        self.loop.close()
        asyncio.set_event_loop(None)

    def run(self, work: Any) -> Any:
        async def inside() -> Any:
            return work()

        return self.loop.run_until_complete(inside())

    @initialize(workers=st.integers(1, 3))
    def start(self, workers: int) -> None:
        def make() -> Pool:
            pool = Pool(self.clock, max_queue_size=6, lease_s=50.0, alpha=0.3)
            for number in range(workers):
                pool.heard(pool.add(f"http://x:{number}"), facts())
            return pool

        self.pool: Pool = self.run(make)

    def worker(self, number: int) -> Worker:
        workers = list(self.pool.workers.values())
        return workers[number % len(workers)]

    @rule(history=st.sampled_from([None, "a", "b"]), is_turn=st.booleans(), first=st.booleans())
    def enter(self, history: str | None, is_turn: bool, first: bool) -> None:
        wanted = turn(history) if is_turn else plain(session=history)
        try:
            ticket = self.run(lambda: self.pool.enter(wanted, first=first))
        except (QueueFullError, UnavailableError):
            return
        self.waiting.insert(0 if first else len(self.waiting), ticket)

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 99), ok=st.booleans(), history=st.sampled_from(["a", "b", "c"]))
    def release(self, number: int, ok: bool, history: str) -> None:
        lease = self.leases.pop(number % len(self.leases))

        def work() -> None:
            if ok:
                lease.keep(history, "e", 1)
            lease.release(ok=ok)
            lease.release(ok=ok)

        self.run(work)

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 99), lost=st.booleans())
    def fail(self, number: int, lost: bool) -> None:
        lease = self.leases.pop(number % len(self.leases))

        def work() -> None:
            lease.release(ok=False)
            self.pool.failed(lease, "bad", lost=lost)

        self.run(work)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 99), cancels=st.booleans())
    def leave(self, number: int, cancels: bool) -> None:
        ticket = self.waiting.pop(number % len(self.waiting))
        self.run(lambda: self.pool.cancel(ticket.id) if cancels else self.pool.leave(ticket))

    @rule(number=st.integers(0, 9), slots=st.integers(1, 3), draining=st.booleans(), restarted=st.booleans())
    def hear(self, number: int, slots: int, draining: bool, restarted: bool) -> None:
        self.boots += restarted
        said = facts(slots=slots, draining=draining, boot_id=str(self.boots))
        self.run(lambda: self.pool.heard(self.worker(number), said))

    @rule(number=st.integers(0, 9), refused=st.booleans())
    def miss(self, number: int, refused: bool) -> None:
        self.run(lambda: self.pool.missed(self.worker(number), "no answer", refused=refused))

    @precondition(lambda self: len(self.pool.workers) > 1)
    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        self.run(lambda: self.pool.remove(self.worker(number).name))

    @rule()
    def add(self) -> None:
        if len(self.pool.workers) < 4:
            self.run(lambda: self.pool.heard(self.pool.add("http://x:9"), facts()))

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

        def work() -> None:
            self.pool.expire()
            self.pool.settle()

        self.run(work)

    @invariant()
    def holds(self) -> None:
        if self.pool is None:
            return
        served = [ticket for ticket in self.waiting if ticket.lease.done()]
        assert served == self.waiting[: len(served)] or all(t.lease.exception() for t in served), "overtaken"
        for ticket in served:
            if ticket.lease.exception() is None:
                self.leases.append(ticket.lease.result())
        self.waiting = [ticket for ticket in self.waiting if not ticket.lease.done()]
        self.leases = [lease for lease in self.leases if lease.open]
        assert self.pool.tickets == self.waiting
        assert [ticket.position for ticket in self.waiting] == list(range(1, len(self.waiting) + 1))
        assert list(self.pool.leases) == sorted(self.leases, key=list(self.pool.leases).index)
        for worker in self.pool.workers.values():
            own = [lease for lease in self.leases if lease.worker is worker]
            assert worker.in_flight == len(own)
            assert worker.turns == sum(lease.wanted.turn for lease in own)
            used = [place for place in worker.places if place.used]
            assert sorted(map(id, used)) == sorted(id(lease.place) for lease in own if lease.place is not None)
            assert all(place.history is None for place in used)
            assert worker.unbegun_tokens == pytest.approx(sum(lease.choice.uncached_tokens for lease in own))
        if self.waiting:
            now = self.clock()
            is_turn = self.waiting[0].wanted.turn
            free = [worker for worker in self.pool.workers.values() if worker.room(now, turn=is_turn)]
            if is_turn:
                free = [w for w in free if w.has_empty_place() or w.oldest_place() is not None]
            assert not free, "room lies idle"


TestPoolWalk = PoolWalk.TestCase
TestPoolWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
