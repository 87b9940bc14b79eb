"""From a checked body to the engine: `Server` is what all endpoints share, a `Job` is one request that generates.

Invariants: a job that was started is closed exactly once, in a `finally`, and is in `Server.jobs` only in between; its
first engine id is its caller's, which for HTTP is the request's, so that `X-Request-Id`, the answer's `id` and the
engine's words agree; where a gateway has given an id of its own, clients are shown that one. Each of its ids holds one
place of `Server.admission` from before it is submitted until it has ended or was closed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import State

from weft.backends.base import check_kind
from weft.backends.registry import EMBEDDING_ENGINES
from weft.config.settings import Settings
from weft.core.errors import EngineError, InvalidRequestError, NotFoundError, UnavailableError, WeftError
from weft.core.sampling import SamplingParams
from weft.engine.client import EngineClient, EngineOp, ModelFacts
from weft.ipc.errors import error_from
from weft.ipc.messages import End, MediaItem, TextDelta, TextRequest
from weft.media.messages import split
from weft.server import schemas
from weft.server.admission import Admission
from weft.server.conversations import Conversations
from weft.server.gateways import check_resume, route_of, shown_id, with_gateways_seed
from weft.server.measures import Measures
from weft.server.media import MediaDesk
from weft.server.prefixes import HeldPrefixes
from weft.server.readers import BodyReaders
from weft.server.sessions import Session, session_of
from weft.server.values import Prompt
from weft.web.edge import REQUEST_ID
from weft.web.errors import log

QUERY_LIMIT_S = 2.0
"""How long the engine has for an answer about itself."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a TextRequest has besides its prompt and its sampling parameters."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    echo: bool = False
    resume: schemas.Resume | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a job is: the id that it goes by, what the log calls it, and its session.

    `shown_id`: what its client is shown, where a gateway has given the request an id of its own, and is told the tokens
    of streams. `admitted`: it was let in before, so that it may go on while the server drains.
    """

    id: int
    name: str
    session: Session | None = None
    shown_id: int | None = None
    route: str | None = None
    admitted: bool = False


class Server:
    """What all endpoints share; `app.state.server`.

    Attributes:
        jobs: those that run, by the id that they go by.
        boot_id: new with each start of the process.
        conversations: of streaming sessions.
        prefixes: what the engine holds, for gateways.
        engine_metrics: the engine's last answer to "metrics".
    """

    def __init__(self, client: EngineClient, facts: ModelFacts, settings: Settings, state: State) -> None:
        self.client = client
        self.facts = facts
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self.admission = Admission(
            facts.geometry["max_queue_size"],
            facts.geometry["max_concurrent_requests"],
            priority=settings.scheduler.priority,
        )
        self.measures = Measures()
        self.readers = BodyReaders(facts.max_context_tokens)
        self.prefixes = HeldPrefixes()
        self.media = MediaDesk(facts, settings.media)
        self.engine_metrics: dict[str, Any] = {}
        self.boot_id = secrets.token_hex(8)
        self.conversations = Conversations(
            settings.http.max_sessions, settings.kv_cache, self.boot_id, end_lease=self._end_lease
        )
        self._state = state

    @property
    def draining(self) -> bool:
        return bool(self._state.draining)

    async def ask_engine(self, op: EngineOp, limit_s: float, **about: Any) -> dict[str, Any]:
        """The engine's answer. Raises UnavailableError when it takes longer, and what the engine raises."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.client.engine_query(op, **about)
        except TimeoutError:
            raise UnavailableError(f"no answer from the engine within {limit_s:g} s", code="engine_busy") from None

    def states(self, engine: Mapping[str, int]) -> dict[str, int]:
        """Open requests by state; what is open here and not in the engine's running set yet is queued."""
        pending, processing = engine.get("pending", 0), engine.get("processing", 0)
        queued = max(engine.get("queued", 0), self.client.open_requests - pending - processing)
        return {"queued": queued, "pending": pending, "processing": processing}

    def check_admitting(self, *, admitted: bool = False) -> None:
        """Raises UnavailableError or QueueFullError when nothing new is taken, whatever it is.

        `admitted`: it belongs to what was let in before a drain began.
        """
        if self.draining and not admitted:
            raise UnavailableError("the server is shutting down and takes no new requests", code="draining")
        self.client.check_alive()
        self.admission.check_room(self.client.retry_after_s)

    @property
    def model_names(self) -> list[str]:
        """What requests may call for: the model, then its adapters, in the order of their numbers."""
        return [self.facts.served_name, *self.settings.model.lora]

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for a model that is not served here; no name means the one that is."""
        if name is not None and name not in self.model_names:
            raise NotFoundError(
                f"model: {name!r} is not served here (allowed: {', '.join(map(repr, self.model_names))})",
                param="model",
                code="model_not_found",
            )

    def check_kind(self, *, embeds: bool) -> None:
        """Raises InvalidRequestError for what another kind of model does, NotFoundError for what no model here does."""
        backend = self.facts.backend
        if embeds and backend not in EMBEDDING_ENGINES:
            raise NotFoundError(f"embeddings: the {backend} engine does not provide them (llama_cpp does)")
        check_kind(self.facts.features, embeds=embeds)

    def check_token_ids(self, ids: list[int], param: str, where: str | None = None) -> None:
        """Raises InvalidRequestError for ids beyond the vocabulary; `where`: the place in `param`."""
        if ids and max(ids) >= self.facts.vocab_size:
            allowed = f"0 to {self.facts.vocab_size - 1}"
            raise InvalidRequestError(
                f"{where or param}: token id {max(ids)} is not in the vocabulary (allowed: {allowed})", param=param
            )

    def start(
        self,
        request: Request | Caller,
        body: schemas.Request,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        n: int = 1,
        options: Options | None = None,
        at_once: int | None = None,
    ) -> Job:
        """Submits `n` answers to every prompt. Raises WeftError, with nothing left behind.

        `at_once` (with `n` 1): of more prompts than this, the others follow when those before them have ended.
        """
        self.check_admitting(admitted=isinstance(request, Caller) and request.admitted)
        self.check_model(body.model)
        for prompt in prompts:
            self.media.check(prompt.messages or [])
        priority = body.priority or 0
        self._check_priority(priority)
        places = len(prompts) * n if at_once is None else min(len(prompts), at_once)
        self._check_count(places, n)
        if not isinstance(request, Caller):
            params = with_gateways_seed(request, params)
        _check_seed(params.seed, n)
        params.check_vocabulary(self.facts.vocab_size)
        options = options or Options()
        if options.resume is not None:
            self.check_token_ids(options.resume.token_ids, "weft_resume")
            check_resume(options.resume, params, stream=bool(body.stream), answers=len(prompts) * n, echo=options.echo)
        caller = request if isinstance(request, Caller) else self._caller(request, len(prompts) * n)
        self.admission.reserve(places, priority, self.client.retry_after_s)
        try:
            return Job(self, caller, body, prompts, params, n, options, places)
        except BaseException:
            self.admission.free(priority, places)
            raise

    def _caller(self, request: Request, answers: int) -> Caller:
        session = session_of(request.headers, self.settings.kv_cache, answers=answers)
        return Caller(
            request.scope[REQUEST_ID],
            f"{request.method} {request.url.path}",
            session,
            shown_id(request),
            route_of(request),
        )

    async def _end_lease(self, session_id: str) -> None:
        """The engine need not keep this session's KV any longer."""
        try:
            await self.ask_engine("end_session", QUERY_LIMIT_S, session_id=session_id)
        except WeftError as error:  # above all: it keeps none
            log.debug("session %s: %s", session_id, error.message)

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and not self.settings.scheduler.priority:
            raise InvalidRequestError(
                f"priority: {priority} is not allowed (allowed: 0, because the setting scheduler.priority is off)",
                param="priority",
            )

    def _check_count(self, answers: int, n: int) -> None:
        most = self.settings.http.max_queue_size
        if answers > max(1, most):
            raise InvalidRequestError(
                f"{'n' if n > 1 else 'prompt'}: {answers} answers (prompts × n) never fit the queue"
                f" (allowed: {most}, the setting http.max_queue_size)",
                param="n" if n > 1 else "prompt",
            )


class Job:
    """One request that generates: its ids, its Generation, what it used, and its line in the log.

    `model` is the name that it called for; `adapter` the number of that adapter, 0 for the model itself.
    `engine_id` is the first of its ids, `public_id` what its client is shown. `resumed`: its answer has begun before,
    elsewhere. `tells_tokens`: its stream goes to a gateway, which is told the tokens.

    Making one submits it; whoever does has reserved its `places`, each of which serves one id after another where there
    are more ids. Raises WeftError, with nothing submitted.
    """

    def __init__(
        self,
        server: Server,
        caller: Caller,
        body: schemas.Request,
        prompts: list[Prompt],
        params: SamplingParams,
        n: int,
        options: Options,
        places: int,
    ) -> None:
        resume = options.resume
        self.engine_id = caller.id
        self.public_id = caller.id if caller.shown_id is None else caller.shown_id
        self.resumed = resume is not None
        self.created = int(time.time()) if resume is None or resume.created is None else resume.created
        self.arrival_s = time.monotonic()
        ids = [self.engine_id, *server.client.new_ids(len(prompts) * n - 1)]
        self.ids_by_prompt = [ids[i : i + n] for i in range(0, len(ids), n)]
        self.index_of = {request_id: index for index, request_id in enumerate(ids)}
        self.n = n
        self.tells_tokens = len(ids) == 1 and caller.shown_id is not None
        self.model = body.model or server.facts.served_name
        self.priority = body.priority or 0
        self.session = session = caller.session
        self.ends: dict[int, End] = {}
        self.adapter = server.model_names.index(self.model)
        self._server = server
        self._name = caller.name
        self._route = caller.route
        self._user = body.user
        self._outcome = "499"
        self._left, self._places = len(ids), places
        self._last_token_s: dict[int, float] = {}
        # Submitted media leave this process: nothing here keeps their samples.
        chats = [(None, []) if p.messages is None else split(p.messages, MediaItem) for p in prompts]
        self.prompts = [replace(p, messages=messages) for p, (messages, _) in zip(prompts, chats, strict=True)]
        requests = [
            TextRequest(
                request_ids=ids,
                params=params,
                text=prompt.text,
                token_ids=prompt.token_ids,
                messages=messages,
                template_kwargs=options.template_kwargs,
                stream=bool(body.stream),
                echo=options.echo,
                priority=self.priority,
                arrival_s=self.arrival_s,
                deadline_s=None if body.timeout_s is None else self.arrival_s + body.timeout_s,
                session_id=None if session is None else session.id,
                session_ttl_s=None if session is None else session.ttl_s,
                adapter=self.adapter,
                resume_ids=[] if resume is None else resume.token_ids,
                resume_chars=None if resume is None else resume.chars,
                media=media,
            )
            for prompt, ids, (messages, media) in zip(prompts, self.ids_by_prompt, chats, strict=True)
        ]
        at_once = places if places < len(ids) else None
        self.generation = server.client.submit(*requests, on_end=self._ended, at_once=at_once)
        server.jobs[self.engine_id] = self

    def index(self, delta: TextDelta) -> int:
        """Which choice a delta belongs to. Raises the WeftError that ended it, if one did."""
        end = delta.end
        if end is not None:
            self.ends[delta.request_id] = end
            if end.state != "completed":
                raise error_from(end.error) if end.error is not None else EngineError(f"the request ended: {end.state}")
        return self.index_of[delta.request_id]

    def streamed(self, deltas: list[TextDelta]) -> None:
        """Times the tokens that a stream is about to send."""
        now = time.monotonic()
        measures, last = self._server.measures, self._last_token_s
        for delta in deltas:
            tokens = len(delta.token_ids)
            if not tokens:
                continue
            if delta.request_id in last:
                measures.streamed(tokens, now - last[delta.request_id])
            else:
                measures.time_to_first_token.observe(now - self.arrival_s)
            last[delta.request_id] = now

    def shown_id(self, request_id: int) -> int:
        """What the client is shown for one of its ids; a gateway has one for all of them."""
        return request_id if self.public_id == self.engine_id else self.public_id

    def open_ids(self) -> list[int]:
        """Those of its ids that have not ended."""
        return [request_id for request_id in self.index_of if self._server.client.is_open(request_id)]

    def succeeded(self) -> None:
        self._outcome = "200"

    def failed(self, error: WeftError) -> None:
        self._outcome = f"{error.http_status} {error.code or ''}".rstrip()

    def close(self) -> None:
        """Ends what has not ended; idempotent."""
        self.generation.close()
        if self._server.jobs.pop(self.engine_id, None) is None:
            return
        prompt, cached, completion = self.tokens()
        log.info(
            "request %d: %s %s, prompt %d, cached %d, completion %d tokens, %.3f s%s%s",
            self.engine_id,
            self._name,
            self._outcome,
            prompt,
            cached,
            completion,
            time.monotonic() - self.arrival_s,
            "" if self.public_id == self.engine_id else f", the gateway's {self.public_id}",
            "" if self._user is None else f", user {self._user!r}",
        )

    def tokens(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens; a prompt counts once, whatever `n`."""
        prompt = cached = 0
        for ids in self.ids_by_prompt:
            ends = [self.ends[i] for i in ids if i in self.ends]
            prompt += max((end.prompt_tokens for end in ends), default=0)
            cached += max((end.cached_tokens for end in ends), default=0)
        return prompt, cached, sum(end.completion_tokens for end in self.ends.values())

    def facts(self) -> dict[str, Any]:
        """The `weft` object of an answer: seconds of the slowest choice, retractions of all, first miss, and route."""
        ends = [self.ends[request_id] for request_id in self.index_of if request_id in self.ends]
        times = {
            name: max((getattr(end, name) for end in ends), default=0.0)
            for name in ("queue_s", "prefill_s", "decode_s")
        }
        miss = ends[0].miss if ends else None
        return times | {
            "retractions": sum(end.retractions for end in ends),
            "route": self._route,
            "miss": None if miss is None else msgspec.structs.asdict(miss),
        }

    def _ended(self, request_id: int, end: End | None) -> None:
        """One of the ids has ended, or was closed before that."""
        self._left -= 1
        if self._left < self._places:
            self._places -= 1
            self._server.admission.free(self.priority)
        self._server.measures.ended(end, time.monotonic() - self.arrival_s)
        if end is not None:
            prompt = self.prompts[self.index_of[request_id] // self.n]
            adapter = self.model if self.adapter else ""
            self._server.prefixes.note(prompt, adapter, end, self._server.client.beat)


def _check_seed(seed: int | None, n: int) -> None:
    """The k-th answer gets `seed + k`, which must stay a 64-bit number."""
    if seed is not None and seed + n - 1 >= 2**64:
        raise InvalidRequestError(f"seed: {seed} is too large for n = {n}", param="seed")
