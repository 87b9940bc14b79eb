"""The pool of workers, the leases on them, and the line of those who wait for one.

Invariants: the line is first in, first out, and nobody overtakes it; a place that becomes free goes to its head in the
same call. A lease is given back exactly once, by whoever has it, or by `expire` when it has shown no sign of life for
`lease_s`. Whoever leaves the line is out of it at once. No I/O here: time is an argument of the clock, health comes in
through `heard` and `missed`. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from weft.core.errors import CancelledError, NotFoundError, QueueFullError, UnavailableError, WeftError
from weft.gateway.estimates import TurnTimes
from weft.gateway.routing import Choice, Wanted, choose
from weft.gateway.workers import PATIENCE_S, STATES, Place, Worker

log = logging.getLogger("weft.gateway")

MAX_SESSIONS = 65536  # whose worker is remembered
MAX_ROUTES = 200  # that are shown
ESTIMATES_S = 0.1


class _ToClient:
    """While the client of a lease takes what it is sent: if that never ends, it is not the worker's fault.

    Entered for every piece of an answer, so it is a plain object, made once.
    """

    __slots__ = ("_lease", "waits")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.waits = False

    def __enter__(self) -> None:
        self.waits = True

    def __exit__(self, *exc_info: object) -> None:
        self.waits = False
        self._lease.touch()


class Lease:
    """The right to use one slot of a worker, and for a session's turn one place of it. See the module's docstring.

    `on_expire` is called when it is taken back; its holder is to stop. `client_stalled`: because the client did not
    take its answer.
    """

    def __init__(self, pool: Pool, wanted: Wanted, choice: Choice, waited_s: float, now_s: float) -> None:
        self.worker = choice.worker
        self.reason = choice.reason
        self.choice = choice
        self.wanted = wanted
        self.waited_s = waited_s
        self.began_s = now_s
        self.touched_s = now_s
        self.place: Place | None = choice.place
        self.epoch: str | None = None  # of what the place held, on a hit
        self.on_expire: Callable[[], None] | None = None
        self.open = True
        self.client_stalled = False
        self.to_client = _ToClient(self)
        self._pool = pool
        self._unbegun = choice.uncached_tokens

    def touch(self) -> None:
        """A sign of life."""
        self.touched_s = self._pool.clock()

    def expire(self) -> None:
        """For the pool: it was silent for too long."""
        self.client_stalled = self.to_client.waits
        self.release(ok=False)
        if self.on_expire is not None:
            self.on_expire()

    def begun(self) -> None:
        """The first word of the answer is here: the prompt has been computed."""
        self.worker.unbegun_tokens -= self._unbegun
        self._unbegun = 0.0

    def release(self, *, ok: bool) -> None:
        """Gives the slot and the place back; idempotent. `ok`: the turn succeeded, and counts in the averages."""
        self._pool.release(self, ok)

    def keep(self, history: str | None, epoch: str, cached_tokens: int) -> None:
        """Before `release`: the turn ended cleanly, and the place holds this conversation now."""
        if self.place is not None and self.open:
            self.place.history, self.place.epoch, self.place.cached_tokens = history, epoch, cached_tokens


class Ticket:
    """A place in the line. `changed` is set whenever its position may have changed; the lease comes through `wait`."""

    def __init__(self, wanted: Wanted, now_s: float) -> None:
        self.id = secrets.token_hex(12)
        self.wanted = wanted
        self.entered_s = now_s
        self.position = 0
        self.changed = asyncio.Event()
        self.lease: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    def end(self, error: WeftError) -> None:
        """No lease will come. Nothing happens where nobody waits any more."""
        if not self.lease.done():
            self.lease.set_exception(error)


class Pool:
    """See the module's docstring.

    Args:
        clock: seconds, monotonic.
        max_queue_size: most tickets in the line.
        lease_s: how long a lease may be without a sign of life.
        alpha: for `TurnTimes`.

    Attributes:
        check_now: called with a worker whose health is to be asked at once.
        routes: the latest decisions, the newest last.
        changed: set whenever a worker has been heard, was missed or has failed.
        failure: set when one has failed, so that `next_event_s` may be sooner.
    """

    def __init__(self, clock: Callable[[], float], *, max_queue_size: int, lease_s: float, alpha: float) -> None:
        self.clock = clock
        self.workers: dict[str, Worker] = {}
        self.times = TurnTimes(alpha)
        self.route_counts: Counter[str] = Counter()
        self.retries = 0
        self.continued = 0
        self.routes: deque[dict[str, Any]] = deque(maxlen=MAX_ROUTES)
        self.check_now: Callable[[Worker], None] = lambda worker: None
        self.changed = asyncio.Event()
        self.failure = asyncio.Event()
        self.leases: dict[Lease, None] = {}
        self.id = secrets.token_hex(4)
        self._max_queue_size = max_queue_size
        self._lease_s = lease_s
        self._line: dict[str, Ticket] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._names = itertools.count(1)
        self._estimates: list[float] = []
        self._estimated_s = 0.0

    # ---- workers ----------------------------------------------------------------------------------------------

    def add(self, url: str, name: str | None = None, *, starting: bool = False) -> Worker:
        """A new worker, not known to be reachable if it is `starting`."""
        number = next(self._names)
        worker = Worker(name or f"w{number}", url.rstrip("/"), number, reachable=not starting, starting=starting)
        self.workers[worker.name] = worker
        return worker

    def remove(self, name: str) -> Worker:
        """Takes a worker out; what runs on it may end there. Raises NotFoundError."""
        worker = self.workers.pop(name, None)
        if worker is None:
            raise NotFoundError(f"no worker {name!r} is known here", param="worker")
        worker.draining = True
        self.settle()
        return worker

    def heard(self, worker: Worker, facts: dict[str, Any]) -> None:
        """A worker has answered a health check."""
        worker.heard(facts)
        self.changed.set()
        self.settle()

    def missed(self, worker: Worker, reason: str, *, refused: bool) -> None:
        """A worker has not."""
        worker.missed(reason, self.clock(), refused=refused)
        self.changed.set()
        self.settle()

    def failed(self, lease: Lease, reason: str, *, lost: bool) -> None:
        """A request failed through the worker's fault; `lost`: the worker seems to be dead. Its health is asked."""
        worker = lease.worker
        worker.failed(reason, self.clock())
        worker.lacks(lease.wanted.digests)
        if lost:
            worker.lost(reason, self.clock())
        log.warning("worker %s failed a request: %s", worker.name, reason)
        self.check_now(worker)
        self.changed.set()
        self.failure.set()
        self.settle()

    @property
    def models(self) -> set[str]:
        """What the workers serve."""
        return {worker.model for worker in self.workers.values() if worker.model is not None}

    def states(self) -> dict[str, int]:
        """Workers by state."""
        counts = dict.fromkeys(STATES, 0)
        now = self.clock()
        for worker in self.workers.values():
            counts[worker.state(now)] += 1
        return counts

    # ---- the line ---------------------------------------------------------------------------------------------

    def enter(self, wanted: Wanted, *, first: bool = False) -> Ticket:
        """A ticket; its lease is there at once where somebody has room and nobody waits.

        `first`: at the head of the line, for whoever had a lease already. Raises QueueFullError, or UnavailableError
        when there is no worker that could ever take it.
        """
        ticket = Ticket(wanted, self.clock())
        self._check_hope()
        if not self._line or first:
            lease = self._assign(ticket)
            if lease is not None:
                ticket.lease.set_result(lease)
                return ticket
        if first:
            self._line = {ticket.id: ticket, **self._line}
        elif len(self._line) >= self._max_queue_size:
            after = self.estimates()[-1] if self._line else self.times.expected_s(wanted.kind)
            raise QueueFullError(f"the line is full: {len(self._line)} wait", retry_after_s=after)
        else:
            self._line[ticket.id] = ticket
        self._renumber()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Whoever waits has gone, or does not want to any more; idempotent. A lease that has come is given back."""
        if self._line.pop(ticket.id, None) is not None:
            ticket.lease.cancel()
            self._renumber()
        elif ticket.lease.done() and not ticket.lease.cancelled() and ticket.lease.exception() is None:
            ticket.lease.result().release(ok=False)

    def cancel(self, ticket_id: str) -> None:
        """Ends a ticket with a CancelledError. Raises NotFoundError."""
        ticket = self._line.pop(ticket_id, None)
        if ticket is None:
            raise NotFoundError(f"no ticket {ticket_id[:80]!r} waits here", param="ticket")
        ticket.end(CancelledError("the ticket was cancelled"))
        self._renumber()

    @property
    def tickets(self) -> list[Ticket]:
        return list(self._line.values())

    def ticket(self, ticket_id: str) -> Ticket:
        """Raises NotFoundError."""
        if ticket_id not in self._line:
            raise NotFoundError(f"no ticket {ticket_id[:80]!r} waits here", param="ticket")
        return self._line[ticket_id]

    def estimates(self) -> list[float]:
        """Seconds until each ticket in the line has a lease, in its order."""
        now = self.clock()
        left = [self.times.expected_s(lease.wanted.kind) - (now - lease.began_s) for lease in self.leases]
        return self.times.waits_s(left, 0, [ticket.wanted.kind for ticket in self._line.values()])

    def estimate(self, position: int) -> tuple[float, int]:
        """Seconds until whoever has this position has a lease, and how many wait.

        The numbers may be `ESTIMATES_S` old: with a thousand who wait, a thousand ask whenever the line moves.
        """
        now = self.clock()
        if now - self._estimated_s >= ESTIMATES_S or position > len(self._estimates):
            self._estimates, self._estimated_s = self.estimates(), now
        wait_s = self._estimates[position - 1] if 0 < position <= len(self._estimates) else 0.0
        return wait_s, len(self._line)

    def settle(self) -> None:
        """Gives what is free to those who wait, in order; ends all of them when no worker is left to wait for."""
        while self._line:
            ticket = next(iter(self._line.values()))
            if ticket.lease.done():  # cancelled by its owner, who is about to leave
                del self._line[ticket.id]
                self._renumber()
                continue
            lease = self._assign(ticket)
            if lease is None:
                break
            del self._line[ticket.id]
            ticket.lease.set_result(lease)
            self._renumber()
        if self._line:
            try:
                self._check_hope()
            except UnavailableError as error:
                self.fail_all(error)

    def fail_all(self, error: WeftError) -> None:
        """Ends everybody's waiting."""
        for ticket in self.tickets:
            ticket.end(error)
        self._line.clear()

    # ---- leases -----------------------------------------------------------------------------------------------

    def release(self, lease: Lease, ok: bool) -> None:
        if not lease.open:
            return
        lease.open = False
        del self.leases[lease]
        now, worker = self.clock(), lease.worker
        lease.begun()
        worker.in_flight -= 1
        worker.turns -= lease.wanted.turn
        if lease.place is not None:
            lease.place.used, lease.place.last_used_s = False, now
        if ok:
            worker.succeeded()
            self.times.succeeded(lease.wanted.kind, now - lease.began_s)
        self.settle()

    def expire(self) -> None:
        """Takes back the leases that have been without a sign of life for too long."""
        now = self.clock()
        for lease in [lease for lease in self.leases if now - lease.touched_s >= self._lease_s]:
            log.error("a lease on worker %s was silent for %g s and is taken back", lease.worker.name, self._lease_s)
            lease.expire()

    def next_event_s(self) -> float:
        """How long until time alone may change something: a lease has to be taken back, or a worker has rested."""
        now = self.clock()
        oldest = min((lease.touched_s for lease in self.leases), default=now)
        workers = self.workers.values()
        rested = [worker.rests_until_s for worker in workers if worker.rests_until_s > now]
        given_up = [worker.troubled_s + PATIENCE_S for worker in workers if worker.troubled_s is not None]
        return max(0.05, min([oldest + self._lease_s, *rested, *(at for at in given_up if at > now)]) - now)

    # ---- insides ----------------------------------------------------------------------------------------------

    def _assign(self, ticket: Ticket) -> Lease | None:
        now, wanted = self.clock(), ticket.wanted
        home = self._homes.get(wanted.session) if wanted.session is not None else None
        turn_s = self.times.expected_s(wanted.kind)
        choice = choose(wanted, self.workers.values(), now, home=home, turn_s=turn_s)
        if choice is None:
            return None
        lease = Lease(self, wanted, choice, now - ticket.entered_s, now)
        worker = choice.worker
        if wanted.turn:
            if lease.place is None:
                lease.place = worker.empty_place(f"gw-{self.id}-")
                assert lease.place is not None
            lease.epoch = lease.place.epoch if choice.reason == "hit" else None
            lease.place.clear()  # until the turn has ended cleanly
            lease.place.used = True
        elif wanted.digests:
            worker.holds(wanted.digests)
        if wanted.session is not None:
            self._homes[wanted.session] = worker.name
            self._homes.move_to_end(wanted.session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        worker.in_flight += 1
        worker.turns += wanted.turn
        worker.requests_total += 1
        worker.last_used_s = now
        worker.unbegun_tokens += choice.uncached_tokens
        self.leases[lease] = None
        return lease

    def _check_hope(self) -> None:
        """Raises UnavailableError when no worker takes work, or will soon."""
        now = self.clock()
        if any(worker.may_return(now) for worker in self.workers.values()):
            return
        states = ", ".join(f"{worker.name} {worker.state(now)}" for worker in self.workers.values())
        raise UnavailableError(f"no worker is available ({states or 'none is known'})", code="no_worker")

    def _renumber(self) -> None:
        for position, ticket in enumerate(self._line.values(), 1):
            if position != ticket.position:
                ticket.position = position
                ticket.changed.set()

    def counted(self, lease: Lease, reason: str, cached_tokens: int | None = None) -> None:
        """A decision has become an answer: it goes into the metrics and the list of routes."""
        self.route_counts[reason] += 1
        if reason in ("hit", "prefix", "session"):
            lease.worker.hits_total += 1
        cost = lease.choice.cost_s
        self.routes.append(
            {
                "time": round(time.time(), 3),
                "kind": lease.wanted.kind,
                "worker": lease.worker.name,
                "reason": reason,
                "cached_tokens": cached_tokens,
                "cost": None if cost is None else round(cost, 6),
                "waited_s": round(lease.waited_s, 6),
            }
        )
