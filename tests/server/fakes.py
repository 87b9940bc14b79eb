"""An EngineClient without processes: what it is asked is kept, what it answers is scripted by the test."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from weft.config.settings import EngineSettings, HttpSettings, SchedulerSettings, Settings
from weft.core.errors import InvalidRequestError, NotFoundError, UnavailableError, WeftError
from weft.core.plan import Float32s
from weft.engine.client import ModelFacts
from weft.engine.generation import Generation, OnEnd
from weft.ipc.errors import error_from, error_info
from weft.ipc.messages import End, ErrorInfo, Heartbeat, TextDelta, TextLogprob, TextQuery, TextRequest

FACTS = ModelFacts(
    served_name="weft-demo",
    backend="fake",
    description="a fake",
    dtype="float32",
    vocab_size=1000,
    max_context_tokens=64,
    kv_tokens=4096,
    has_chat_template=True,
    created=1700000000,
    geometry={"max_queue_size": 256, "max_concurrent_requests": 64},
)

EMBEDDER = replace(FACTS, features=frozenset({"embeddings"}), dimensions=4, has_chat_template=False)

STATES = {"queued": 0, "pending": 0, "processing": 0}
STATS: dict[str, Any] = {"requests": STATES | {"finished": {}}, "engine": {"backend": "fake", "idle": True}}

Behaviour = Callable[["FakeEngineClient", TextRequest], None]


def settings(**http: Any) -> Settings:
    """Default settings but for these of `http`, with priorities on."""
    return Settings(http=HttpSettings(**http), scheduler=SchedulerSettings(priority=True), engine=EngineSettings())


def ended(reason: str = "stop", completion_tokens: int = 2, **fields: Any) -> End:
    numbers = {"prompt_tokens": 5, "cached_tokens": 3, "queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3}
    return End("completed", finish_reason=reason, completion_tokens=completion_tokens, **(numbers | fields))


def failed(status: int, message: str = "scripted", *, state: str = "failed", **fields: Any) -> End:
    return End(state, error=ErrorInfo(status, message, **fields))


def logprob(token: str, value: float = -0.5) -> TextLogprob:
    top = [(token, token.encode(), value), ("other", b"other", float("-inf"))]
    return TextLogprob(token, token.encode(), value, top)


def says(*texts: str, end: End | None = None) -> Behaviour:
    """Every id answers with these texts, one delta each, and then ends; log probabilities where asked for."""

    def behaviour(client: FakeEngineClient, request: TextRequest) -> None:
        for request_id in request.request_ids:
            last = end if end is not None else ended(completion_tokens=len(texts))
            for i, text in enumerate(texts):
                first = i == 0 and request.echo
                scored = request.params.prompt_logprobs is not None and first
                client.deliver(
                    request_id,
                    text,
                    token_ids=[100 + i],
                    logprobs=None if request.params.logprobs is None else [logprob(text)],
                    prompt_text=(request.text or "decoded prompt") if first else None,
                    prompt_logprobs=[None, logprob("b"), logprob("é")] if scored else None,
                )
            client.deliver(request_id, end=End(**msgspec.structs.asdict(last)))

    return behaviour


def embeds(*vectors: list[float], end: End | None = None) -> Behaviour:
    """The k-th request of all gets the k-th of these vectors, again from the first one behind the last."""

    def behaviour(client: FakeEngineClient, request: TextRequest) -> None:
        vector = vectors[(len(client.requests) - 1) % len(vectors)]
        last = end if end is not None else ended(completion_tokens=0, cached_tokens=0)
        data = np.array(vector, dtype="<f4").tobytes()
        client.deliver(request.request_ids[0], embedding=data, end=End(**msgspec.structs.asdict(last)))

    return behaviour


def says_one_by_one(*texts: str, end: End | None = None) -> Behaviour:
    """As `says`, but each delta comes when the server has taken the one before, so that none are merged."""

    async def speak(client: FakeEngineClient, generation: WatchedGeneration) -> None:
        for request_id in generation.request_ids:
            last = end if end is not None else ended(completion_tokens=len(texts))
            for i, text in enumerate(texts):
                client.deliver(request_id, text, token_ids=[100 + i])
                await generation.taken.wait()
                generation.taken.clear()
            client.deliver(request_id, end=End(**msgspec.structs.asdict(last)))

    def behaviour(client: FakeEngineClient, request: TextRequest) -> None:
        client.speaking = asyncio.ensure_future(speak(client, client.generation_of(request)))

    return behaviour


def silent(client: FakeEngineClient, request: TextRequest) -> None:
    """The test delivers by hand."""


class WatchedGeneration(Generation):
    """Tells when deltas have been taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taken = asyncio.Event()

    async def take(self) -> list[TextDelta]:
        deltas = await super().take()
        self.taken.set()
        return deltas


class FakeSpeaker:
    """Speaks every word as one clause of 240 equal samples. `gates`, by clause, hold up the threads.

    `failures`: the errors that clauses raise, by number. `begun`: voices and speeds of the texts; `made`: how many
    clauses were begun; `said`: those that were, in order. `clones`: whether it takes reference audio.
    """

    name = "fake-speech"
    sample_rate = 24_000
    default_voice = "auto"

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.references: list[Float32s | None] = []
        self.said: list[str] = []
        self.gates: dict[int, threading.Event] = {}
        self.failures: dict[int, Exception] = {}
        self.made = 0
        self.clones = self.closed = False

    def begin(self, voice: str, speed: float, reference: Float32s | None) -> FakeSpeech:
        if voice not in ("auto", "en-us"):
            raise InvalidRequestError(f"voice: {voice!r} is not allowed (allowed: auto, en-us)", param="voice")
        if speed < 0.5:
            raise InvalidRequestError(f"speed: {speed:g} is not allowed (allowed: 0.5 to 4)", param="speed")
        if reference is not None and not self.clones:
            raise InvalidRequestError(
                "tts_ref_audio_base64: not supported by fake-speech", param="tts_ref_audio_base64"
            )
        self.begun.append((voice, speed))
        self.references.append(reference)
        return FakeSpeech(self)

    def close(self) -> None:
        self.closed = True
        for gate in self.gates.values():
            gate.set()


class FakeSpeech:
    """One text of a FakeSpeaker's."""

    def __init__(self, speaker: FakeSpeaker) -> None:
        self._speaker = speaker
        self._text = ""
        self._count = itertools.count()

    def push(self, text: str) -> list[str]:
        *words, self._text = (self._text + text).split(" ")
        return [word for word in words if word]

    def finish(self) -> list[str]:
        return self._text.split()

    def say(self, clause: str) -> Float32s:
        speaker, number = self._speaker, next(self._count)
        speaker.made += 1
        speaker.said.append(clause)
        if number in speaker.gates:
            assert speaker.gates[number].wait(10)
        if number in speaker.failures:
            raise speaker.failures[number]
        return np.full(240, (number + 1) / 10, np.float32)


class FakeEngineClient:
    """The interface of `EngineClient`, in memory. `behaviour` is called with every request that is submitted."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour: Behaviour = behaviour or says("Hello", " world")
        self.requests: list[TextRequest] = []
        self.queries: list[TextQuery] = []
        self.aborted: list[int] = []
        self.submitted = asyncio.Event()
        self.abort_seen = asyncio.Event()
        self.engine_answers: dict[str, Any] = {
            "stats": STATS,
            "flush_cache": {"flushed_tokens": 7},
            "metrics": {"counters": {}, "gauges": {}, "histograms": {}},
            "requests": {"requests": []},
            "request": NotFoundError("not known here", param="request_id"),
            "sessions": {"sessions": []},
            "end_session": {"ended": True, "aborted": 0},
            "cache": {"capacity": 4, "free": 4, "cached": 0, "active": 0, "nodes": [], "truncated": 0},
        }
        self.engine_queries: list[tuple[str, dict[str, Any]]] = []
        self.text_answer: dict[str, Any] | WeftError = {
            "count": 2,
            "tokens": b"[1,2]",
            "pieces": b'["a","b"]',
            "text": "ab",
        }
        self.failure: WeftError | None = None
        self.last_heartbeat_s = {"engine": time.monotonic(), "text0": time.monotonic()}
        self.retry_after_s = 7.2
        self.beat = Heartbeat("engine")
        self.speaking: asyncio.Future[None] | None = None
        self._ids = itertools.count(1)
        self._generations: dict[int, WatchedGeneration] = {}

    @property
    def open_requests(self) -> int:
        return len(self._generations)

    def new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    def check_alive(self) -> None:
        if self.failure is not None:
            raise UnavailableError(f"the engine is not available: {self.failure.message}")

    def submit(self, *requests: TextRequest, on_end: OnEnd | None = None, at_once: int | None = None) -> Generation:
        self.check_alive()
        now = len(requests) if at_once is None else at_once
        generation = WatchedGeneration(self, requests[:now], requests[now:], on_end)
        self._generations |= dict.fromkeys(generation.request_ids, generation)
        for request in requests[:now]:
            self.send(request)
        self.submitted.set()
        return generation

    def send(self, request: TextRequest) -> None:
        self.requests.append(request)
        self.behaviour(self, request)

    def generation_of(self, request: TextRequest) -> WatchedGeneration:
        return self._generations[request.request_ids[0]]

    def deliver(self, request_id: int, text: str = "", **fields: Any) -> None:
        generation = self._generations.get(request_id)
        if generation is not None:
            generation.deliver(TextDelta(request_id, text, **fields))

    def abort(self, request_ids: list[int] | None) -> None:
        ids = list(self._generations) if request_ids is None else request_ids
        self.aborted += ids
        self.abort_seen.set()
        loop = asyncio.get_running_loop()
        for request_id in ids:  # later, as from another process
            loop.call_soon(self._cancelled, request_id)

    def _cancelled(self, request_id: int) -> None:
        self.deliver(
            request_id, end=End("cancelled", error=ErrorInfo(499, "the request was aborted", code="cancelled"))
        )

    def forget(self, request_id: int) -> None:
        self._generations.pop(request_id, None)

    def is_open(self, request_id: int) -> bool:
        return request_id in self._generations

    async def tokenize(self, query: TextQuery) -> dict[str, Any]:
        self.queries.append(query)
        if isinstance(self.text_answer, WeftError):
            raise error_from(error_info(self.text_answer))
        return self.text_answer

    async def engine_query(self, op: str, **about: Any) -> dict[str, Any]:
        self.check_alive()
        self.engine_queries.append((op, about))
        answer = self.engine_answers[op]
        if answer is None:  # hangs
            await asyncio.Event().wait()
        if isinstance(answer, WeftError):
            raise error_from(error_info(answer))
        return copy.deepcopy(answer)
