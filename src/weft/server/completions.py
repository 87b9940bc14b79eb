"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.ipc.messages import TextDelta
from weft.server.chat import finish_fields
from weft.server.endpoint import generating
from weft.server.jobs import Job, Options, Server
from weft.server.params import check_stream_options, sampling_params
from weft.server.schemas import CompletionRequest
from weft.server.streaming import Writer
from weft.server.wire import ChunkHead, JsonList, TextLogprobs, document, empty_lists, join_lists, to_json

DEFAULT_MAX_TOKENS = 16


def begin_completion(server: Server, request: Request, body: CompletionRequest) -> tuple[Job, Writer]:
    """Continues texts or token ids, as one document or as a stream of chunks."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        text = f"best_of: {body.best_of} is not supported in this version (allowed: the value of n, {body.n or 1})"
        raise InvalidRequestError(text, param="best_of", code="unsupported_parameter")
    for prompt in body.prompt:
        server.check_token_ids(prompt.token_ids or [], "prompt")
    # A prompt is scored by generating one token that nobody sees.
    score_only = body.max_tokens == 0 and bool(body.echo)
    params = _params(body, score_only)
    with_usage = check_stream_options(body)
    options = Options(echo=bool(body.echo), resume=body.weft_resume)
    job = server.start(request, body, body.prompt, params, n=body.n or 1, options=options)
    choices = [_Choice(score_only=score_only, with_logprobs=body.logprobs is not None) for _ in job.index_of]
    if body.stream:
        return job, CompletionStream(job, choices, job.model, with_usage=with_usage, with_facts=bool(body.weft))
    return job, CompletionDocument(job, choices, job.model, with_facts=bool(body.weft))


completions = generating(CompletionRequest, begin_completion)


def _params(body: CompletionRequest, score_only: bool) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return sampling_params(
        body,
        names={"include_stop": "include_stop_str_in_output", "prompt_logprobs": "logprobs"},
        max_new_tokens=1 if score_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        include_stop=body.include_stop_str_in_output,
    )


class _Choice:
    """What one choice adds to the answer for each of its deltas: text, and log probabilities with running offsets."""

    def __init__(self, *, score_only: bool, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self._score_only = score_only
        self._logprobs = TextLogprobs() if with_logprobs else None

    def take(self, delta: TextDelta) -> tuple[str, dict[str, list[Any]] | None]:
        """The new text, and the four lists for its tokens; None when there are none."""
        if self._score_only and delta.end is not None:
            delta.end.finish_reason = "length"  # as if it had ended before the token
            delta.end.stop = None
            delta.end.completion_tokens = 0
        text = (delta.prompt_text or "") + ("" if self._score_only else delta.text)
        parts = []
        if self._logprobs is not None and delta.prompt_text is not None:
            # A prompt of one token has no log probabilities at all.
            parts.append(self._logprobs.take_prompt(delta.prompt_text, delta.prompt_logprobs or [None]))
        if self._logprobs is not None and delta.resumed_bytes:
            self._logprobs.skip(delta.resumed_bytes)
        if self._logprobs is not None and delta.logprobs and not self._score_only:
            parts.append(self._logprobs.take(delta.logprobs))
        return text, join_lists(parts) if parts else None


class CompletionStream:
    """Chunks; the last one of each choice carries the finish reason."""

    def __init__(self, job: Job, choices: list[_Choice], model: str, *, with_usage: bool, with_facts: bool) -> None:
        self._job = job
        self._choices = choices
        self._begun: set[int] = {0} if job.resumed else set()
        self._head = ChunkHead(
            job, f"cmpl-{job.public_id}", "text_completion", model, with_usage=with_usage, with_facts=with_facts
        )

    def add(self, delta: TextDelta) -> bytes:
        index = self._job.index(delta)
        text, logprobs = self._choices[index].take(delta)
        if index not in self._begun:
            self._begun.add(index)
        elif not text and logprobs is None and delta.end is None:
            return b""  # half a character, or what may become a stop string
        return b'%b%d,"text":%b,"logprobs":%b,%b%b' % (
            self._head.choice,
            index,
            to_json(text),
            to_json(logprobs),
            finish_fields(delta.end),
            self._head.end,
        )

    def finish(self) -> bytes:
        return self._head.tail()


class CompletionDocument:
    """The whole answer in one document; choices in the order of the prompts, `n` for each."""

    def __init__(self, job: Job, choices: list[_Choice], model: str, *, with_facts: bool) -> None:
        self._job = job
        self._choices = choices
        self._model = model
        self._with_facts = with_facts
        self._texts: list[list[str]] = [[] for _ in choices]
        self._logprobs = [{name: JsonList() for name in empty_lists()} for _ in choices]

    def add(self, delta: TextDelta) -> bytes:
        index = self._job.index(delta)
        text, logprobs = self._choices[index].take(delta)
        self._texts[index].append(text)
        for name, values in (logprobs or {}).items():
            self._logprobs[index][name].extend(values)
        return b""

    def finish(self) -> bytes:
        choices = [self._choice(request_id, index) for request_id, index in self._job.index_of.items()]
        return document(self._job, "cmpl", "text_completion", self._model, choices, with_facts=self._with_facts)

    def _choice(self, request_id: int, index: int) -> dict[str, Any]:
        end = self._job.ends[request_id]
        logprobs = {name: values.raw() for name, values in self._logprobs[index].items()}
        return {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": logprobs if self._choices[index].with_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop,
        }
