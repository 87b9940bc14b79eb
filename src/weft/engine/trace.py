"""Traces: everything that went into a scheduler and everything it decided, as JSON lines in the order it happened.

The first line is a `Header` with what a fresh scheduler and cache need; every other line is an event with the time that
the scheduler's clock showed, `t`, in seconds. Inputs (`Add`, `Abort`, `Complete`, `Expire`, `Flush`, `Reset`,
`EndSession`, `Apply`, `Fail`, `Cancelled`) are enough to do it all over again; `Refused`, `Plan` and `End` are what the
scheduler made of them, for comparison. `weft simulate FILE` does that. Token ids are little-endian int32, base64.

`Recorder` is called by the engine and never disturbs it: a call appends to a list, a thread of its own encodes and
writes. A disk that is full or too slow ends the recording, with one line in the log, not the engine.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from weft.core.clock import Clock
from weft.core.errors import SettingsError, WeftError
from weft.core.media import MediaSpan, Medium
from weft.core.plan import PIECE_TOKENS, Int32s, StepPlan, StepResult
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache
from weft.media.hashing import media_keys
from weft.scheduler.limits import Limits
from weft.scheduler.reserve import START
from weft.scheduler.scheduler import Scheduler, Update

logger = logging.getLogger(__name__)

VERSION = 1
FLUSH_S = 0.5
MAX_WAITING_BYTES = 64 * 2**20
"""So much may wait for the disk, before recording is given up."""

_NO_SAMPLES = np.empty(0, dtype=np.uint8)
_EVENT_BYTES = 256  # roughly what an event in the buffer takes besides its arrays


class TraceError(WeftError):
    """A trace cannot be read: no trace, of another version, or damaged before its end."""


class CacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `PrefixCache`."""

    capacity: int
    page_size: int
    max_rows: int
    max_len: int
    retain: Literal["prefix", "none"]
    eviction_policy: Literal["lru", "lfu", "fifo"]
    eviction_threshold: float
    bytes_per_token: int
    num_sequences: int | None = None
    shares: bool = True
    host_tokens: int = 0
    resident_tokens: int = 0
    piece_tokens: int = PIECE_TOKENS

    def make(self) -> PrefixCache:
        return PrefixCache(**msgspec.structs.asdict(self))


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `Scheduler` besides limits, cache and clock; `seed` is `scheduler.seed`."""

    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int
    adapters: int = 0


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="weft-trace", tag_field="e"):
    """The first line.

    Attributes:
        note: for people, such as the model's name.
        depth: steps that may be in flight at once.
        new_token_ratio: what admission reserves at the start, see `scheduler/reserve.py`; it adapts.
    """

    version: int = VERSION
    weft: str = ""
    note: str = ""
    depth: int = 1
    new_token_ratio: float = START
    limits: Limits
    cache: CacheShape
    model: ModelFacts

    def make(self, clock: Clock) -> Scheduler:
        """A fresh scheduler as described."""
        scheduler = Scheduler(self.limits, self.cache.make(), clock, **msgspec.structs.asdict(self.model))
        scheduler._ratio.value = self.new_token_ratio
        return scheduler


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="e"):
    t: float


class Add(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """`Scheduler.add`; `params` without what is default. `media`: start, end and digest of each, not what they show."""

    id: int
    prompt: bytes
    params: msgspec.Raw
    arrival: float | None = None
    priority: int = 0
    deadline: float | None = None
    session: str | None = None
    ttl: float | None = None
    adapter: int = 0
    resume: bytes = b""
    media: list[tuple[int, int, str]] = []

    def prompt_ids(self) -> Int32s:
        return np.frombuffer(self.prompt, dtype="<i4").astype(np.int32, copy=False)

    def resume_ids(self) -> Int32s | None:
        return np.frombuffer(self.resume, dtype="<i4").astype(np.int32, copy=False) if self.resume else None

    def spans(self) -> tuple[MediaSpan, ...]:
        """The media, without their samples: their keys are all that a scheduler knows of them."""
        return tuple(
            MediaSpan(start, Medium("image", digest, _NO_SAMPLES), media_keys(digest, end - start, self.adapter))
            for start, end, digest in ((start, end, bytes.fromhex(text)) for start, end, text in self.media)
        )

    def sampling(self) -> SamplingParams:
        return msgspec.json.decode(self.params, type=SamplingParams)


class Refused(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="refused"):
    """The `add` before it raised; `code` is the error's."""

    id: int
    code: str | None = None


class Abort(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    id: int
    since: float | None = None


class Complete(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="complete"):
    id: int


class Expire(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="expire"):
    pass


class Flush(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="flush"):
    """`PrefixCache.flush`."""


class Reset(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="reset"):
    """`PrefixCache.reset`."""


class EndSession(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="end_session"):
    session: str


class Plan(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="plan"):
    """`Scheduler.plan`; `step` -1: it gave None.

    Attributes:
        ids: request ids in row order. lens: tokens after the step. extend: new tokens (empty: one each).
        silent: rows that do not emit. slots: digest of where the new tokens' KV goes. adapter: of all rows.
    """

    step: int = -1
    mode: str = ""
    ids: list[int] = []
    lens: list[int] = []
    extend: list[int] = []
    silent: list[int] = []
    slots: str = ""
    adapter: int = 0


class Apply(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="apply"):
    """`Scheduler.apply`: `tokens` and `errors` of the result."""

    step: int
    tokens: list[int]
    errors: dict[int, str] = {}


class Fail(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    step: int
    message: str


class Cancelled(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="cancelled"):
    step: int


class End(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """A request's ending; `reason` is its finish reason, or its error's code. `cached`: prompt tokens reused."""

    id: int
    state: str
    reason: str | None = None
    tokens: int = 0
    cached: int = 0
    retractions: int = 0


Event = Add | Refused | Abort | Complete | Expire | Flush | Reset | EndSession | Plan | Apply | Fail | Cancelled | End


# ---- events from live objects; what they need of arrays is copied or never changed afterwards --------------------


def plan_event(now_s: float, plan: StepPlan | None) -> Plan:
    """The compact form of a decision, which recorder and replay share."""
    if plan is None:
        return Plan(t=now_s)
    extend = plan.extend_lens.tolist()
    return Plan(
        t=now_s,
        step=plan.step,
        mode=plan.mode,
        ids=plan.request_ids.tolist(),
        lens=plan.seq_lens.tolist(),
        extend=extend if plan.num_tokens != plan.num_rows else [],
        silent=np.flatnonzero(~plan.emits).tolist(),
        slots=hashlib.blake2b(plan.slots.tobytes(), digest_size=8).hexdigest(),
        adapter=plan.adapter,
    )


def end_event(now_s: float, update: Update) -> End:
    """The ending of an update that has one."""
    request, ending = update.request, update.ending
    assert ending is not None
    reason = ending.finish_reason
    return End(
        t=now_s,
        id=request.request_id,
        state=ending.state.value,
        reason=reason.value if reason is not None else ending.error.code if ending.error is not None else None,
        tokens=request.output_len,
        cached=request.reused_tokens,
        retractions=request.retractions,
    )


_PARAM_DEFAULTS: dict[str, Any] = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


def _params(params: SamplingParams) -> msgspec.Raw:
    changed = {name: v for name, default in _PARAM_DEFAULTS.items() if (v := getattr(params, name)) != default}
    return msgspec.Raw(msgspec.json.encode(changed))


# ---- writing -----------------------------------------------------------------------------------------------------


def keep_older(path: Path) -> None:
    """Renames a trace that is there already to `path` with `.1` at its end. Raises SettingsError."""
    if path.is_file() and path.stat().st_size:
        try:
            path.replace(path.with_name(path.name + ".1"))
        except OSError as error:
            raise SettingsError(f"--record {path}: {error.strerror}") from error


class Recorder:
    """Writes a trace. All methods but `close` belong to the engine's thread; none of them raises.

    Args:
        path: the file; what it held is lost. Raises SettingsError where it cannot be written.
        header: of the scheduler, before its first event.
        patient: wait for the disk instead of giving up when too much is waiting (for runs on a virtual clock).
    """

    def __init__(self, path: Path, header: Header, *, patient: bool = False) -> None:
        self.path = path
        self._patient = patient
        self._waiting: list[Callable[[], msgspec.Struct]] = []
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._broken = False
        self._encoder = msgspec.json.Encoder()
        try:
            self._file = path.open("wb")
            self._file.write(self._encoder.encode(header) + b"\n")
            self._file.flush()
        except OSError as error:
            raise SettingsError(f"--record {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def recording(self) -> bool:
        """False once it was closed or had to be given up."""
        return not self._broken and not self._stop.is_set()

    def close(self) -> None:
        """Writes what is waiting. May be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=10)
        self._flush()
        try:
            self._file.close()
        except OSError as error:
            self._give_up(f"{error}")

    # ---- what goes in ---------------------------------------------------------------------------------------------

    def add(
        self,
        now_s: float,
        request_id: int,
        prompt_ids: Int32s,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        deadline_s: float | None = None,
        session_id: str | None = None,
        session_ttl_s: float | None = None,
        adapter: int = 0,
        resume_ids: Int32s | None = None,
        media: tuple[MediaSpan, ...] = (),
    ) -> None:
        """Before `Scheduler.add`. The prompt and what is resumed must not be changed afterwards."""
        self._note(
            lambda: Add(
                t=now_s,
                id=request_id,
                prompt=np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes(),
                params=_params(params),
                arrival=arrival_s,
                priority=priority,
                deadline=deadline_s,
                session=session_id,
                ttl=session_ttl_s,
                adapter=adapter,
                resume=b"" if resume_ids is None else np.ascontiguousarray(resume_ids, dtype="<i4").tobytes(),
                media=[(span.start, span.end, span.medium.digest.hex()) for span in media],
            ),
            prompt_ids.nbytes + (0 if resume_ids is None else resume_ids.nbytes),
        )

    def refused(self, now_s: float, request_id: int, error: WeftError) -> None:
        """After a `Scheduler.add` that raised."""
        self._note(lambda: Refused(t=now_s, id=request_id, code=error.code))

    def abort(self, now_s: float, request_id: int, since_s: float | None = None) -> None:
        self._note(lambda: Abort(t=now_s, id=request_id, since=since_s))

    def complete(self, now_s: float, request_id: int) -> None:
        self._note(lambda: Complete(t=now_s, id=request_id))

    def expire(self, now_s: float) -> None:
        self._note(lambda: Expire(t=now_s))

    def flush(self, now_s: float) -> None:
        self._note(lambda: Flush(t=now_s))

    def reset(self, now_s: float) -> None:
        self._note(lambda: Reset(t=now_s))

    def end_session(self, now_s: float, session_id: str) -> None:
        self._note(lambda: EndSession(t=now_s, session=session_id))

    def apply(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        step, tokens, errors = plan.step, result.tokens, result.errors
        self._note(lambda: Apply(t=now_s, step=step, tokens=tokens.tolist(), errors=dict(errors)), tokens.nbytes)

    def fail(self, now_s: float, plan: StepPlan, message: str) -> None:
        step = plan.step
        self._note(lambda: Fail(t=now_s, step=step, message=message))

    def cancelled(self, now_s: float, plan: StepPlan) -> None:
        step = plan.step
        self._note(lambda: Cancelled(t=now_s, step=step))

    # ---- what comes out -------------------------------------------------------------------------------------------

    def plan(self, now_s: float, plan: StepPlan | None) -> None:
        """After `Scheduler.plan`, also when it gave None: it may have ended or moved requests all the same."""
        event = plan_event(now_s, plan)  # at once: holding on to the plan would hold on to its page table
        self._note(lambda: event, 16 * len(event.ids))

    def updates(self, now_s: float, updates: Iterable[Update]) -> None:
        """After `Scheduler.take_updates`."""
        for update in updates:
            if update.ending is not None:
                event = end_event(now_s, update)
                self._note(lambda event=event: event)  # type: ignore[misc]

    # ---- insides --------------------------------------------------------------------------------------------------

    def _note(self, make: Callable[[], msgspec.Struct], num_bytes: int = 0) -> None:
        if self._broken or self._stop.is_set():
            return
        with self._lock:
            self._waiting.append(make)
            self._waiting_bytes += _EVENT_BYTES + num_bytes
        if self._waiting_bytes <= MAX_WAITING_BYTES:
            return
        if self._patient:
            self._flush()
        else:
            self._give_up("the disk does not keep up")

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        with self._write_lock:
            with self._lock:
                events, self._waiting, self._waiting_bytes = self._waiting, [], 0
            if self._broken or not events:
                return
            try:
                for make in events:
                    self._file.write(self._encoder.encode(make()) + b"\n")
                self._file.flush()
            except Exception as error:  # a trace is never worth more than the requests
                self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        if self._broken:
            return
        self._broken = True
        with self._lock:
            self._waiting, self._waiting_bytes = [], 0
        logger.error("recording to %s has stopped: %s; the trace ends here", self.path, reason)


# ---- reading -----------------------------------------------------------------------------------------------------


class TraceFile:
    """A trace on disk, read as it is iterated over.

    Attributes:
        header: its first line.
        torn: after iterating: whether the last line was cut short (the process was killed), and so left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        self._decoder = msgspec.json.Decoder(Event)  # type: ignore[arg-type]
        try:
            with path.open("rb") as file:
                first = file.readline()
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror}") from error
        try:
            version = msgspec.json.decode(first, type=_Version).version
            if version != VERSION:
                raise TraceError(f"{path}: a trace of version {version}; this program reads version {VERSION}")
            self.header = msgspec.json.decode(first, type=Header)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}: this is not a trace of weft ({error})") from error

    def __iter__(self) -> Iterator[Event]:
        """All events. Raises TraceError for a damaged line that is not the last one."""
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, 2):
                try:
                    yield self._decoder.decode(line)
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n"):
                        self.torn = True
                        return
                    raise TraceError(f"{self.path}, line {number}: {error}") from error


class _Version(msgspec.Struct, tag="weft-trace", tag_field="e"):
    version: int
