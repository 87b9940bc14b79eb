"""POST /v1/embeddings: every input is a request of its own to the engine, and the answer waits for all of them."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
from fastapi import Request

from weft.core.errors import EngineError, InvalidRequestError, WeftError
from weft.core.plan import Float32s
from weft.core.sampling import SamplingParams
from weft.core.vectors import check_dimensions, truncated
from weft.ipc.messages import TextDelta
from weft.server.endpoint import generating
from weft.server.jobs import Job, Server
from weft.server.schemas import EmbeddingRequest
from weft.server.sessions import ID_HEADER, TTL_HEADER
from weft.server.wire import to_json

RUNNING_SETS_AT_ONCE = 2
"""Of many inputs, so many times what the engine runs are on their way: it never waits for more, and others get in."""


def begin_embeddings(server: Server, request: Request, body: EmbeddingRequest) -> tuple[Job, EmbeddingDocument]:
    """The vectors of texts or token ids."""
    for header in (ID_HEADER, TTL_HEADER):
        if header in request.headers:
            raise InvalidRequestError(f"{header}: embeddings keep no KV, so there is no session", param=header)
    if body.dimensions is not None:
        check_dimensions(body.dimensions, server.facts.dimensions or 0)
    for where, prompt in body.places():
        server.check_token_ids(prompt.token_ids or [], "input", where)
    running = server.facts.geometry["max_concurrent_requests"]
    at_once = max(1, min(server.settings.http.max_queue_size, RUNNING_SETS_AT_ONCE * running))
    job = server.start(request, body, body.input.items, SamplingParams(embed=True), at_once=at_once)
    return job, EmbeddingDocument(job, body, server.facts.served_name)


embeddings = generating(EmbeddingRequest, begin_embeddings, embeds=True)


class EmbeddingDocument:
    """The whole answer; every vector becomes JSON as it comes, so that none of many holds up the others' streams."""

    def __init__(self, job: Job, body: EmbeddingRequest, model: str) -> None:
        self._job = job
        self._model = model
        self._dimensions = body.dimensions
        self._base64 = body.encoding_format == "base64"
        self._places = [where for where, _ in body.places()]
        self._items: list[msgspec.Raw | None] = [None] * len(self._places)

    def add(self, delta: TextDelta) -> bytes:
        try:
            index = self._job.index(delta)
            if delta.embedding is not None:
                self._items[index] = self._item(index, delta.embedding)
        except WeftError as error:
            raise self._named(error, self._places[self._job.index_of[delta.request_id]]) from None
        return b""

    def finish(self) -> bytes:
        prompt_tokens, _, _ = self._job.tokens()
        document = {
            "object": "list",
            "data": self._items,
            "model": self._model,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }
        return to_json(document)

    def _item(self, index: int, data: bytes) -> msgspec.Raw:
        vector: Float32s = np.frombuffer(data, dtype="<f4")
        if self._dimensions is not None:
            vector = truncated(vector, self._dimensions)
        if self._base64:
            told: object = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
        else:
            told = vector.tolist()
        return msgspec.Raw(to_json({"object": "embedding", "index": index, "embedding": told}))

    def _named(self, error: WeftError, where: str) -> WeftError:
        """The error of one input as the whole request's, in the words of its body."""
        if error.param == "prompt":
            return InvalidRequestError(where + error.message.removeprefix("prompt"), param="input", code=error.code)
        if error.param is None and isinstance(error, (InvalidRequestError, EngineError)):
            return type(error)(f"{where}: {error.message}", param="input", code=error.code)
        return error
