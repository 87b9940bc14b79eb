"""From a checked body to the engine: `Server` is what all endpoints share, a `Job` is one HTTP request that generates.

Invariants: a job that was started is closed exactly once, in a `finally`, and is in `Server.jobs` only in between; its
first engine id is the HTTP request's id, so that `X-Request-Id`, the answer's `id` and the engine's words agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.datastructures import State

from weft.config.settings import Settings
from weft.core.errors import EngineError, InvalidRequestError, NotFoundError, UnavailableError, WeftError
from weft.core.sampling import SamplingParams
from weft.engine.client import EngineClient, ModelFacts
from weft.ipc.errors import error_from
from weft.ipc.messages import End, TextDelta, TextRequest
from weft.server import schemas
from weft.server.errors import log
from weft.server.limits import REQUEST_ID
from weft.server.values import Prompt


@dataclass(frozen=True, slots=True)
class Options:
    """What a TextRequest has besides its prompt and its sampling parameters."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    echo: bool = False


class Server:
    """What all endpoints share; `app.state.server`."""

    def __init__(self, client: EngineClient, facts: ModelFacts, settings: Settings, state: State) -> None:
        self.client = client
        self.facts = facts
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self._state = state

    @property
    def draining(self) -> bool:
        return bool(self._state.draining)

    def check_admitting(self) -> None:
        """Raises UnavailableError when nothing new is taken."""
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests", code="draining")

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for a model that is not served here; no name means the one that is."""
        if name is not None and name != self.facts.served_name:
            raise NotFoundError(
                f"model: {name!r} is not served here (allowed: {self.facts.served_name!r})",
                param="model",
                code="model_not_found",
            )

    def check_token_ids(self, ids: list[int], param: str) -> None:
        """Raises InvalidRequestError for ids beyond the vocabulary."""
        if ids and max(ids) >= self.facts.vocab_size:
            raise InvalidRequestError(
                f"{param}: token id {max(ids)} is not in the vocabulary (allowed: 0 to {self.facts.vocab_size - 1})",
                param=param,
            )

    def start(
        self,
        request: Request,
        body: schemas.Request,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        n: int = 1,
        options: Options | None = None,
    ) -> Job:
        """Submits `n` answers to every prompt. Raises WeftError, with nothing left behind."""
        self.check_admitting()
        self.check_model(body.model)
        self._check_priority(body.priority or 0)
        self._check_count(len(prompts), n)
        _check_seed(params.seed, n)
        params.check_vocabulary(self.facts.vocab_size)
        job = Job(self, request, prompts, n, body.user)
        deadline_s = None if body.timeout_s is None else job.arrival_s + body.timeout_s
        options = options or Options()
        job.submit(
            TextRequest(
                request_ids=ids,
                params=params,
                text=prompt.text,
                token_ids=prompt.token_ids,
                messages=prompt.messages,
                template_kwargs=options.template_kwargs,
                stream=bool(body.stream),
                echo=options.echo,
                priority=body.priority or 0,
                arrival_s=job.arrival_s,
                deadline_s=deadline_s,
            )
            for prompt, ids in zip(prompts, job.ids_by_prompt, strict=True)
        )
        return job

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and not self.settings.scheduler.priority:
            raise InvalidRequestError(
                f"priority: {priority} is not allowed (allowed: 0, because the setting scheduler.priority is off)",
                param="priority",
            )

    def _check_count(self, prompts: int, n: int) -> None:
        most = self.settings.http.max_queue_size
        if prompts * n > max(1, most):
            raise InvalidRequestError(
                f"{'n' if n > 1 else 'prompt'}: {prompts * n} answers (prompts × n) never fit the queue"
                f" (allowed: {most}, the setting http.max_queue_size)",
                param="n" if n > 1 else "prompt",
            )


class Job:
    """One HTTP request that generates: its ids, its Generation, what it used, and its line in the log."""

    def __init__(self, server: Server, request: Request, prompts: list[Prompt], n: int, user: str | None) -> None:
        self.public_id: int = request.scope[REQUEST_ID]
        self.created = int(time.time())
        self.arrival_s = time.monotonic()
        ids = [self.public_id, *server.client.new_ids(len(prompts) * n - 1)]
        self.ids_by_prompt = [ids[i : i + n] for i in range(0, len(ids), n)]
        self.prompts = prompts
        self.index_of = {request_id: index for index, request_id in enumerate(ids)}
        self.n = n
        self.ends: dict[int, End] = {}
        self._server = server
        self._path = request.url.path
        self._user = user
        self._outcome = "499"

    def submit(self, requests: Any) -> None:
        self.generation = self._server.client.submit(*requests)
        self._server.jobs[self.public_id] = self

    def index(self, delta: TextDelta) -> int:
        """Which choice a delta belongs to. Raises the WeftError that ended it, if one did."""
        end = delta.end
        if end is not None:
            self.ends[delta.request_id] = end
            if end.state != "completed":
                raise error_from(end.error) if end.error is not None else EngineError(f"the request ended: {end.state}")
        return self.index_of[delta.request_id]

    def succeeded(self) -> None:
        self._outcome = "200"

    def failed(self, error: WeftError) -> None:
        self._outcome = f"{error.http_status} {error.code or ''}".rstrip()

    def close(self) -> None:
        """Ends what has not ended; idempotent."""
        self.generation.close()
        if self._server.jobs.pop(self.public_id, None) is None:
            return
        prompt, cached, completion = self.tokens()
        log.info(
            "request %d: POST %s %s, prompt %d, cached %d, completion %d tokens, %.3f s%s",
            self.public_id,
            self._path,
            self._outcome,
            prompt,
            cached,
            completion,
            time.monotonic() - self.arrival_s,
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

    def times(self) -> dict[str, float]:
        """The `weft` object of an answer: seconds in each state, of the slowest choice."""
        ends = self.ends.values()
        return {
            name: max((getattr(end, name) for end in ends), default=0.0)
            for name in ("queue_s", "prefill_s", "decode_s")
        }


def _check_seed(seed: int | None, n: int) -> None:
    """The k-th answer gets `seed + k`, which must stay a 64-bit number."""
    if seed is not None and seed + n - 1 >= 2**64:
        raise InvalidRequestError(f"seed: {seed} is too large for n = {n}", param="seed")
