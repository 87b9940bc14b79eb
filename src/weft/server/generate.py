"""POST /generate: the native endpoint. The names of its sampling parameters are those of `SamplingParams`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request

from weft.core.errors import InvalidRequestError
from weft.ipc.messages import TextDelta
from weft.server.endpoint import generating
from weft.server.jobs import Job, Options, Server
from weft.server.params import sampling_params
from weft.server.schemas import GenerateRequest, NativeSampling
from weft.server.streaming import Writer
from weft.server.values import Prompts
from weft.server.wire import DONE, to_json


def begin_generate(server: Server, request: Request, body: GenerateRequest) -> tuple[Job, Writer]:
    """Continues texts or token ids; the answer tells the new token ids, too."""
    prompts = _prompts(body)
    for prompt in prompts.items:
        server.check_token_ids(prompt.token_ids or [], "input_ids")
    sampling = body.sampling_params or NativeSampling()
    params = sampling_params(
        sampling,
        names={"max_tokens": "max_new_tokens"},
        max_new_tokens=sampling.max_new_tokens,
        include_stop=sampling.include_stop,
    )
    job = server.start(request, body, prompts.items, params, options=Options(resume=body.weft_resume))
    return job, GenerateStream(job, prompts.many) if body.stream else GenerateDocument(job, prompts.many)


generate = generating(GenerateRequest, begin_generate)


def _prompts(body: GenerateRequest) -> Prompts:
    if body.text is not None and body.input_ids is not None:
        raise InvalidRequestError("input_ids: only one of text and input_ids is allowed", param="input_ids")
    prompts = body.text if body.text is not None else body.input_ids
    if prompts is None:
        raise InvalidRequestError("text: one of text and input_ids is needed", param="text", code="missing_parameter")
    return prompts


def _meta(job: Job, request_id: int) -> dict[str, Any]:
    end = job.ends.get(request_id)
    if end is None:
        return {"id": f"gen-{job.shown_id(request_id)}", "finish_reason": None}
    return {
        "id": f"gen-{job.shown_id(request_id)}",
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop,
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "cached_tokens": end.cached_tokens,
        "e2e_latency_s": round(time.monotonic() - job.arrival_s, 6),
    }


class GenerateStream:
    """Events with the new text and the new ids; of several prompts, each event tells its `index`."""

    def __init__(self, job: Job, many: bool) -> None:
        self._job = job
        self._many = many
        self._begun: set[int] = {0} if job.resumed else set()

    def add(self, delta: TextDelta) -> bytes:
        index = self._job.index(delta)
        if index in self._begun and not delta.text and not delta.token_ids and delta.end is None:
            return b""
        self._begun.add(index)
        event: dict[str, Any] = {"index": index} if self._many else {}
        event |= {"text": delta.text, "output_ids": delta.token_ids, "meta_info": _meta(self._job, delta.request_id)}
        return b"data: " + to_json(event) + b"\n\n"

    def finish(self) -> bytes:
        return DONE


class GenerateDocument:
    """One object, or for a list of prompts a list of them in its order."""

    def __init__(self, job: Job, many: bool) -> None:
        self._job = job
        self._many = many
        self._texts: list[list[str]] = [[] for _ in job.index_of]
        self._ids: list[list[int]] = [[] for _ in job.index_of]
        self._metas: dict[int, dict[str, Any]] = {}

    def add(self, delta: TextDelta) -> bytes:
        index = self._job.index(delta)
        self._texts[index].append(delta.text)
        self._ids[index] += delta.token_ids
        if delta.end is not None:
            self._metas[index] = _meta(self._job, delta.request_id)
        return b""

    def finish(self) -> bytes:
        answers = [
            {"text": "".join(self._texts[index]), "output_ids": self._ids[index], "meta_info": self._metas[index]}
            for index in self._job.index_of.values()
        ]
        return to_json(answers if self._many else answers[0])
