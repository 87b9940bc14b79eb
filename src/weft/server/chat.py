"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.ipc.messages import End, TextDelta
from weft.server.endpoint import generating
from weft.server.jobs import Job, Options, Server
from weft.server.params import check_stream_options, sampling_params
from weft.server.schemas import ChatRequest
from weft.server.streaming import Writer
from weft.server.values import Prompt
from weft.server.wire import ChunkHead, JsonList, chat_logprobs, document, to_json


def begin_chat(server: Server, request: Request, body: ChatRequest) -> tuple[Job, Writer]:
    """Answers a chat, as one document or as a stream of chunks."""
    if not server.facts.has_chat_template:
        raise InvalidRequestError("messages: this model has no chat template: use /v1/completions", param="messages")
    params = _params(body)
    with_usage = check_stream_options(body)
    options = Options(
        template_kwargs=template_kwargs(body.add_generation_prompt, body.chat_template_kwargs),
        resume=body.weft_resume,
    )
    job = server.start(request, body, [Prompt(messages=body.messages)], params, n=body.n or 1, options=options)
    if body.stream:
        return job, ChatStream(job, job.model, with_usage=with_usage, with_facts=bool(body.weft))
    return job, ChatDocument(job, job.model, with_facts=bool(body.weft), with_logprobs=bool(body.logprobs))


chat_completions = generating(ChatRequest, begin_chat)


def template_kwargs(add_generation_prompt: bool | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The template's variables; `add_generation_prompt` is among them where it was given."""
    return kwargs if add_generation_prompt is None else {**kwargs, "add_generation_prompt": add_generation_prompt}


def _params(body: ChatRequest) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs: only allowed when logprobs is true", param="top_logprobs")
    newer = body.max_completion_tokens
    if newer is not None and body.max_tokens not in (None, newer):
        raise InvalidRequestError(
            f"max_tokens: {body.max_tokens} contradicts max_completion_tokens {newer}", param="max_tokens"
        )
    return sampling_params(
        body,
        names={
            "max_tokens": "max_tokens" if newer is None else "max_completion_tokens",
            "include_stop": "include_stop_str_in_output",
        },
        max_new_tokens=body.max_tokens if newer is None else newer,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        include_stop=body.include_stop_str_in_output,
    )


class ChatStream:
    """Chunks. The first one of each choice carries the role, the last one the finish reason.

    The first chunk of an answer that goes on went out elsewhere.
    """

    def __init__(self, job: Job, model: str, *, with_usage: bool, with_facts: bool) -> None:
        self._job = job
        self._head = ChunkHead(
            job,
            f"chatcmpl-{job.public_id}",
            "chat.completion.chunk",
            model,
            with_usage=with_usage,
            with_facts=with_facts,
        )
        self._begun: set[int] = {0} if job.resumed else set()

    def add(self, delta: TextDelta) -> bytes:
        index = self._job.index(delta)
        role = b""
        if index not in self._begun:
            self._begun.add(index)
            role = b'"role":"assistant",'
        elif not delta.text and not delta.logprobs and delta.end is None:
            return b""  # half a character, or what may become a stop string
        content = role + b'"content":' + to_json(delta.text) if role or delta.text else b""
        logprobs = to_json({"content": chat_logprobs(delta.logprobs)}) if delta.logprobs else b"null"
        return b'%b%d,"delta":{%b},"logprobs":%b,%b%b' % (
            self._head.choice,
            index,
            content,
            logprobs,
            finish_fields(delta.end),
            self._head.end,
        )

    def finish(self) -> bytes:
        return self._head.tail()


def finish_fields(end: End | None) -> bytes:
    """The JSON fields that tell whether and why a choice has ended."""
    if end is None:
        return b'"finish_reason":null'
    return b'"finish_reason":%b,"stop_reason":%b' % (to_json(end.finish_reason), to_json(end.stop))


class ChatDocument:
    """The whole answer in one document."""

    def __init__(self, job: Job, model: str, *, with_facts: bool, with_logprobs: bool) -> None:
        self._job = job
        self._model = model
        self._with_facts = with_facts
        self._with_logprobs = with_logprobs
        self._texts: list[list[str]] = [[] for _ in job.index_of]
        self._logprobs = [JsonList() for _ in job.index_of]

    def add(self, delta: TextDelta) -> bytes:
        index = self._job.index(delta)
        self._texts[index].append(delta.text)
        self._logprobs[index].extend(chat_logprobs(delta.logprobs or []))
        return b""

    def finish(self) -> bytes:
        choices = [self._choice(request_id, index) for request_id, index in self._job.index_of.items()]
        return document(self._job, "chatcmpl", "chat.completion", self._model, choices, with_facts=self._with_facts)

    def _choice(self, request_id: int, index: int) -> dict[str, Any]:
        end = self._job.ends[request_id]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self._texts[index])},
            "logprobs": {"content": self._logprobs[index].raw()} if self._with_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop,
        }
