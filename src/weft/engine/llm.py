"""`LLM`: the same engine inside one process, for scripts and notebooks.

    llm = LLM()                                   # the bundled demo model
    llm.generate(["Count from 1 to 5."], SamplingParams(temperature=0))
    llm.chat([{"role": "user", "content": "My name is Mira."}])
    for delta in llm.stream("Once"): print(delta, end="")
    LLM("embedder.gguf").embed(["a text", "another"])

Prompts are batched continuously: all of them run through one scheduler, sharing prefixes.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.backends.base import Backend
from weft.backends.registry import create_backend, load_tokenizer, media_placeholders
from weft.config.describe import format_value
from weft.config.resolve import resolve
from weft.config.settings import Settings
from weft.core.errors import InvalidRequestError, NotFoundError, WeftError
from weft.core.media import Medium
from weft.core.plan import Float32s
from weft.core.sampling import SamplingParams
from weft.core.vectors import check_dimensions, truncated
from weft.engine.core import EngineCore
from weft.engine.media import item_of
from weft.engine.text_worker import TextWorker
from weft.ipc.errors import error_from, error_info
from weft.ipc.messages import End, TextDelta, TextLogprob, TextRequest, TokenOutput
from weft.media.messages import check_taken, decoded, split, with_parts

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
EMBED = SamplingParams(embed=True)


@dataclass(slots=True)
class Completion:
    """One finished answer.

    Attributes:
        finish_reason: "stop" or "length".
        cached_tokens: prompt tokens whose KV was reused.
        logprobs: one entry per token, where asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TextLogprob] | None = None
    prompt_logprobs: list[TextLogprob | None] | None = None


class LLM:
    """An engine with its tokenizer, used from one thread.

    Args:
        model: checkpoint folder or GGUF file; None: the bundled demo model.
        dtype: "auto", "float32", "bfloat16" or "float16".
        backend: "auto", "torch", "llama_cpp" or "fake".
        lora: LoRA adapters (GGUF files) by name; every method that generates takes such a name as `adapter`.
        settings: any other setting by its dotted key, such as {"kv_cache.page_size": 16}; or resolved `Settings`, which
            then are all that counts.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        backend: str = "auto",
        lora: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | Settings | None = None,
    ) -> None:
        if not isinstance(settings, Settings):
            flags = {"model.path": model, "model.dtype": dtype, "backend.name": backend, "model.lora": lora}
            settings = _resolve(flags, settings or {})
        self.settings = settings
        self.tokenizer = load_tokenizer(self.settings)
        self._backend: Backend = create_backend(self.settings)
        self._core = EngineCore(self.settings, self._backend)
        self._core.load()
        self._worker = TextWorker(self.tokenizer, placeholders=media_placeholders(self.settings))
        self._ids = itertools.count(1)
        # Request id -> where its deltas go: several streams may be open at once, and each hears only of its own.
        self._arrived: dict[int, deque[TextDelta]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Completes prompts (texts or token ids), all together; answers in the order of the prompts.

        Raises the first request's error (InvalidRequestError and the like); the others are cancelled then.
        """
        texts = _as_prompts(prompts)
        pairs = zip(texts, _each(params, texts), strict=True)
        return self._run([self._request(prompt, p, adapter) for prompt, p in pairs])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **variables: Any,
    ) -> list[Completion]:
        """Answers one conversation, or several; `variables` go to the chat template.

        Contents may have images and sounds in the forms of the HTTP API, where the engine takes them.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._run([self._chat_request(conversation, params, variables, adapter) for conversation in many])

    def run(
        self, jobs: Sequence[tuple[Prompt | Sequence[Message], SamplingParams]], *, adapter: str | None = None
    ) -> list[Completion | WeftError]:
        """Answers prompts and conversations, each with its own parameters; a failed one's error is its answer."""
        answers: list[Completion | WeftError] = [Completion() for _ in jobs]
        requests: list[TextRequest] = []
        place: dict[int, int] = {}
        for index, (prompt, params) in enumerate(jobs):
            request = self._any_request(prompt, params, adapter)
            place[request.request_ids[0]] = index
            requests.append(request)
        with closing(self._deltas(requests)) as deltas:
            for delta in deltas:
                answer = answers[place[delta.request_id]]
                if delta.end is not None and delta.end.error is not None:
                    answers[place[delta.request_id]] = error_from(delta.end.error)
                elif isinstance(answer, Completion):
                    _collect(answer, delta)
        return answers

    def embed(self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[Float32s]:
        """The vectors of texts or token ids, float32 [d] of length 1, in their order; for embedding models only.

        `dimensions`: their first so many values, at length 1 again; None: all that the model has. Raises the first
        text's error; the others are cancelled then.
        """
        most = self._core.geometry.dimensions
        if dimensions is not None and most is not None:
            check_dimensions(dimensions, most)
        requests = [self._request(prompt, EMBED, None, embeds=True) for prompt in _as_prompts(prompts)]
        vectors: dict[int, Float32s] = {}
        with closing(self._deltas(requests)) as deltas:
            for delta in deltas:
                _raise_error(delta.end)
                vector = np.frombuffer(delta.embedding or b"", dtype="<f4").astype(np.float32)
                vectors[delta.request_id] = vector if dimensions is None else truncated(vector, dimensions)
        return [vectors[request.request_ids[0]] for request in requests]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> Iterator[str]:
        """Yields the answer's text piece by piece; closing the iterator cancels the rest."""
        request = self._any_request(prompt, params or SamplingParams(), adapter)
        request.stream = True
        with closing(self._deltas([request])) as deltas:
            for delta in deltas:
                _raise_error(delta.end)
                if delta.text:
                    yield delta.text

    def _adapter_number(self, name: str | None) -> int:
        """An adapter's number; None stands for the model itself. Raises NotFoundError for a name that there is not."""
        if name is None:
            return 0
        names = list(self.settings.model.lora)
        if name not in names:
            raise NotFoundError(f"adapter: there is no {name!r} (allowed: {', '.join(map(repr, names)) or 'none'})")
        return names.index(name) + 1

    @property
    def stats(self) -> dict[str, Any]:
        """The same numbers as `GET /stats`."""
        return self._core.stats()

    def close(self) -> None:
        """Gives the model's memory back. May be called twice."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- insides ----------------------------------------------------------------------------------------------

    def _request(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None, *, embeds: bool = False
    ) -> TextRequest:
        if params.embed and not embeds:
            raise InvalidRequestError("embed: use LLM.embed for vectors", param="embed")
        number = self._adapter_number(adapter)
        request = TextRequest([next(self._ids)], params, arrival_s=time.monotonic(), adapter=number)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids = [int(token) for token in prompt]
        return request

    def _chat_request(
        self, messages: Any, params: SamplingParams | None, variables: dict[str, Any], adapter: str | None
    ) -> TextRequest:
        if params is not None and params.embed:
            raise InvalidRequestError("embed: a chat has no vector; use LLM.embed", param="embed")
        parts = with_parts(messages)
        check_taken(parts, self._backend.features, self._backend.name)
        plain, media = split(decoded(parts, self.settings.media), Medium)
        return TextRequest(
            [next(self._ids)],
            params or SamplingParams(),
            messages=plain,
            media=[item_of(medium) for medium in media],
            template_kwargs=variables,
            arrival_s=time.monotonic(),
            adapter=self._adapter_number(adapter),
        )

    def _any_request(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams, adapter: str | None
    ) -> TextRequest:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self._chat_request(prompt, params, {}, adapter)
        return self._request(prompt, params, adapter)  # type: ignore[arg-type]

    def _run(self, requests: list[TextRequest]) -> list[Completion]:
        answers = {request.request_ids[0]: Completion() for request in requests}
        with closing(self._deltas(requests)) as deltas:
            for delta in deltas:
                _raise_error(delta.end)
                _collect(answers[delta.request_id], delta)
        return list(answers.values())

    def _deltas(self, requests: list[TextRequest]) -> Generator[TextDelta, None, None]:
        """Feeds the queue as it has room, and steps until every request has ended; to be closed by who takes it.

        Closing cancels what has not ended. Requests of others run along, and their deltas wait for them.
        """
        waiting = deque(requests)
        arrived: deque[TextDelta] = deque()
        open_ids = dict.fromkeys(request.request_ids[0] for request in requests)
        self._arrived.update(dict.fromkeys(open_ids, arrived))
        try:
            while open_ids:
                self._feed(waiting, arrived)
                if not arrived:
                    self._push(self._core.step())
                while arrived:
                    delta = arrived.popleft()
                    if delta.end is not None:
                        del open_ids[delta.request_id], self._arrived[delta.request_id]
                    yield delta
        finally:
            self._core.abort(list(open_ids))
            self._push(self._core.take_outputs())
            for request_id in open_ids:
                del self._arrived[request_id]

    def _feed(self, waiting: deque[TextRequest], arrived: deque[TextDelta]) -> None:
        scheduler = self._core.scheduler
        while waiting and len(scheduler.queued) < scheduler.limits.max_queue_size:
            request = waiting.popleft()
            try:
                for submit in self._worker.prepare(request):
                    self._core.submit(submit)
            except WeftError as error:
                arrived.append(TextDelta(request.request_ids[0], end=End("rejected", error=error_info(error))))

    def _push(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            delta, complete = self._worker.push(output)
            if delta is not None:
                self._arrived[output.request_id].append(delta)
            if complete:
                self._core.complete(output.request_id)


def _resolve(flags: Mapping[str, Any], settings: Mapping[str, Any]) -> Settings:
    given = {"http.request_timeout_s": None, **settings}  # nobody is waiting on a connection
    return resolve(
        flags=flags,
        sets=[f"{key}={format_value(value)}" for key, value in given.items()],
    ).settings


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: list[Prompt]) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequestError(f"params: {len(params)} for {len(prompts)} prompts", param="params")
    return list(params)


def _raise_error(end: End | None) -> None:
    if end is not None and end.error is not None:
        raise error_from(end.error)


def _collect(answer: Completion, delta: TextDelta) -> None:
    answer.text += delta.text
    answer.token_ids += delta.token_ids
    if delta.logprobs is not None:
        answer.logprobs = [*(answer.logprobs or []), *delta.logprobs]
    if delta.prompt_logprobs is not None:
        answer.prompt_logprobs = delta.prompt_logprobs
    if delta.end is not None:
        answer.finish_reason = delta.end.finish_reason or ""
        answer.prompt_tokens = delta.end.prompt_tokens
        answer.cached_tokens = delta.end.cached_tokens
