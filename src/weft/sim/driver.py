"""`Driver`: the one place where a simulation or a replay touches the scheduler."""

from __future__ import annotations

import hashlib
import struct

from weft.core.errors import WeftError
from weft.core.media import MediaSpan
from weft.core.plan import Int32s, StepPlan, StepResult
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.engine.trace import Header, Recorder
from weft.scheduler.scheduler import Scheduler, Update


class SetClock:
    """A clock that shows what it is told; unlike `VirtualClock` it takes a time over to the last bit."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class Driver:
    """A fresh scheduler; every call is recorded where wanted, and every decision goes into a digest.

    Args:
        header: what to make.
        recorder: writes a trace of it all.
    """

    def __init__(self, header: Header, recorder: Recorder | None = None) -> None:
        self.clock = SetClock()
        self.scheduler: Scheduler = header.make(self.clock)
        self._recorder = recorder
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def now_s(self) -> float:
        return self.clock.time_s

    def stop_recording(self) -> None:
        """What comes now is no part of the trace."""
        self._recorder = None

    def digest(self) -> str:
        """Of all decisions so far: plans, their results, endings, and when."""
        return self._digest.hexdigest()

    def add(
        self,
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
    ) -> Request | WeftError:
        """The request, or why it was refused."""
        arguments = {
            "priority": priority,
            "arrival_s": arrival_s,
            "deadline_s": deadline_s,
            "session_id": session_id,
            "session_ttl_s": session_ttl_s,
            "adapter": adapter,
            "resume_ids": resume_ids,
            "media": media,
        }
        if self._recorder is not None:
            self._recorder.add(self.now_s, request_id, prompt_ids, params, **arguments)  # type: ignore[arg-type]
        try:
            return self.scheduler.add(request_id, prompt_ids, params, **arguments)  # type: ignore[arg-type]
        except WeftError as error:
            self._digest.update(f"refused {request_id} {error.code}".encode())
            if self._recorder is not None:
                self._recorder.refused(self.now_s, request_id, error)
            return error

    def abort(self, request_id: int, since_s: float | None = None) -> bool:
        if self._recorder is not None:
            self._recorder.abort(self.now_s, request_id, since_s)
        return self.scheduler.abort(request_id, since_s)

    def complete(self, request_id: int) -> bool:
        if self._recorder is not None:
            self._recorder.complete(self.now_s, request_id)
        return self.scheduler.complete(request_id)

    def expire(self) -> None:
        if self._recorder is not None:
            self._recorder.expire(self.now_s)
        self.scheduler.expire()

    def flush(self) -> None:
        if self._recorder is not None:
            self._recorder.flush(self.now_s)
        self.scheduler.cache.flush()

    def reset(self) -> None:
        if self._recorder is not None:
            self._recorder.reset(self.now_s)
        self.scheduler.cache.reset()

    def end_session(self, session_id: str) -> None:
        if self._recorder is not None:
            self._recorder.end_session(self.now_s, session_id)
        self.scheduler.end_session(session_id)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if self._recorder is not None:
            self._recorder.plan(self.now_s, plan)
        if plan is not None:
            digest = self._digest.update
            digest(struct.pack("<dq", self.now_s, plan.step))
            digest(plan.mode.encode())
            digest(plan.adapter.to_bytes(2))
            for array in (plan.request_ids, plan.extend_lens, plan.seq_lens, plan.slots, plan.emits):
                digest(array.tobytes())
            if plan.sequences is not None:
                digest(plan.sequences.tobytes() + repr(plan.kv_ops).encode())
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        if self._recorder is not None:
            self._recorder.apply(self.now_s, plan, result)
        self._digest.update(result.tokens.tobytes())
        self.scheduler.apply(plan, result)

    def fail(self, plan: StepPlan, message: str) -> None:
        if self._recorder is not None:
            self._recorder.fail(self.now_s, plan, message)
        self.scheduler.fail(plan, message)

    def cancelled(self, plan: StepPlan) -> None:
        if self._recorder is not None:
            self._recorder.cancelled(self.now_s, plan)
        self.scheduler.cancelled(plan)

    def take_updates(self) -> list[Update]:
        updates = self.scheduler.take_updates()
        for update in updates:
            if update.ending is not None:
                request = update.request
                text = f"{request.request_id} {request.state.value} {update.ending.finish_reason} {request.output_len}"
                self._digest.update(text.encode() + struct.pack("<d", self.now_s))
        if self._recorder is not None and updates:
            self._recorder.updates(self.now_s, updates)
        return updates
