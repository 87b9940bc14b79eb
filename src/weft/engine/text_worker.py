"""`TextWorker`: everything that turns text into tokens and tokens into text, without any I/O.

The text process and `LLM` both run it. `prepare` may run in another thread than the rest; a request's state exists from
before its Submit is sent until its `end` has come back from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.core.errors import InvalidRequestError
from weft.ipc.messages import (
    End,
    LogprobItem,
    Submit,
    TextDelta,
    TextLogprob,
    TextQuery,
    TextRequest,
    TokenOutput,
)
from weft.text.stream import TextStream
from weft.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _State:
    """One request between its Submit and its end.

    `pending` and `pieces`, its text, collect what the next delta will tell (all of it, for an unstreamed request);
    `used` counts the tokens up to the one that completed a stop string.
    """

    text: TextStream
    streaming: bool
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    pending: TextDelta
    pieces: list[str] = field(default_factory=list)
    used: int = 0
    stopped_by: str | None = None
    finish_sent: bool = False
    prompt_logprobs: list[LogprobItem] = field(default_factory=list)


class TextWorker:
    """See the module's docstring. `index` tells the engine where this request's tokens go."""

    def __init__(self, tokenizer: Tokenizer, index: int = 0) -> None:
        self.tokenizer = tokenizer
        self._index = index
        self._states: dict[int, _State] = {}

    @property
    def open_requests(self) -> int:
        return len(self._states)

    # ---- text to tokens ---------------------------------------------------------------------------------------

    def prepare(self, request: TextRequest) -> list[Submit]:
        """Tokenizes a request and opens its state, once for each id. Raises InvalidRequestError."""
        prompt_ids = self._prompt_ids(request)
        return self.open(request, prompt_ids)

    def open(self, request: TextRequest, prompt_ids: list[int]) -> list[Submit]:
        """Opens the state of a request whose prompt is tokenized; returns what the engine is to be sent."""
        echoed = self._echoed(request, prompt_ids) if request.echo else None
        packed = np.asarray(prompt_ids, dtype=np.int32).tobytes()
        states: dict[int, _State] = {}
        submits: list[Submit] = []
        for offset, request_id in enumerate(request.request_ids):
            params = request.params
            if params.seed is not None and offset:
                params = params.with_seed((params.seed + offset) % 2**64)
            states[request_id] = _State(
                text=TextStream(
                    self.tokenizer,
                    prompt_ids=prompt_ids[-16:] if request.messages is None else (),
                    stops=params.stop,
                    skip_special_tokens=params.skip_special_tokens,
                    include_stop=params.include_stop,
                    min_tokens=params.min_tokens,
                ),
                streaming=request.stream,
                wants_logprobs=params.logprobs is not None,
                wants_prompt_logprobs=params.prompt_logprobs is not None,
                pending=TextDelta(request_id, prompt_text=echoed),
            )
            submits.append(
                Submit(
                    request_id,
                    packed,
                    params,
                    self._index,
                    request.priority,
                    request.arrival_s,
                    request.deadline_s,
                    request.session_id,
                    request.session_ttl_s,
                )
            )
        self._states.update(states)  # all or none: an error above leaves nothing behind
        return submits

    def answer(self, query: TextQuery) -> dict[str, Any]:
        """The result of a tokenize or detokenize query. Raises InvalidRequestError."""
        if query.op == "detokenize":
            ids = query.token_ids or []
            self._check_ids(ids, "tokens")
            return {"text": self.tokenizer.decode(ids, skip_special_tokens=False)}
        ids = self._tokenize(query)
        return {"tokens": ids, "pieces": [self.tokenizer.token_text(i) for i in ids]}

    def _prompt_ids(self, request: TextRequest) -> list[int]:
        if request.token_ids is None:
            return self._tokenize(request)
        for token in request.token_ids:
            if not 0 <= token < 2**31:  # the engine judges by its vocabulary; here it must only fit an int32
                raise InvalidRequestError(f"prompt: token id {token} is not in the vocabulary", param="prompt")
        return request.token_ids

    def _tokenize(self, source: TextRequest | TextQuery) -> list[int]:
        if source.messages is None:
            return self.tokenizer.encode(source.text or "", add_special_tokens=source.add_special_tokens)
        variables = dict(source.template_kwargs)
        prompt_follows = bool(variables.pop("add_generation_prompt", True))
        return self.tokenizer.encode_chat(
            source.messages, add_generation_prompt=prompt_follows, template_kwargs=variables
        )

    def _echoed(self, request: TextRequest, prompt_ids: list[int]) -> str:
        if request.text is not None:
            return request.text
        return self.tokenizer.decode(prompt_ids, skip_special_tokens=request.params.skip_special_tokens)

    def _check_ids(self, ids: list[int], param: str) -> None:
        for token in ids:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {token} is not in the vocabulary"
                    f" (allowed: 0 to {self.tokenizer.vocab_size - 1})",
                    param=param,
                )

    def forget(self, request_id: int) -> None:
        """Drops a request's state; what the engine still says about it is then ignored."""
        self._states.pop(request_id, None)

    # ---- tokens to text ---------------------------------------------------------------------------------------

    def push(self, output: TokenOutput) -> tuple[TextDelta | None, bool]:
        """Takes what a step gave one request.

        Returns the delta that the client is to be sent now, if any, and whether the engine must be told that the text
        is complete (`Finish`).
        """
        state = self._states.get(output.request_id)
        if state is None:
            return None, False
        if output.prompt_logprobs is not None:
            state.prompt_logprobs.extend(output.prompt_logprobs)
        self._push_tokens(state, output)
        tell_engine = state.stopped_by is not None and not state.finish_sent and output.end is None
        state.finish_sent = state.finish_sent or tell_engine
        if output.end is not None:
            self._finish(state, output.end)
            del self._states[output.request_id]
            return _take_delta(state), False
        news = any(state.pieces) or state.pending.token_ids or state.pending.prompt_logprobs
        return _take_delta(state) if state.streaming and news else None, tell_engine

    def _push_tokens(self, state: _State, output: TokenOutput) -> None:
        ids = output.tokens if output.end_token is None else output.tokens[:-1]
        if not output.tokens or state.stopped_by is not None:
            return
        if state.wants_prompt_logprobs:
            state.pending.prompt_logprobs = [None, *(self._logprob(item) for item in state.prompt_logprobs)]
            state.prompt_logprobs, state.wants_prompt_logprobs = [], False
        piece = state.text.push(ids)
        state.used += piece.tokens_used
        state.stopped_by = piece.matched_stop
        state.pieces.append(piece.text)
        state.pending.token_ids.extend(ids[: piece.tokens_used])
        if state.wants_logprobs:
            if state.pending.logprobs is None:
                state.pending.logprobs = []
            state.pending.logprobs.extend(map(self._logprob, (output.logprobs or [])[: piece.tokens_used]))

    def _finish(self, state: _State, end: End) -> None:
        """Completes the last delta: text that was held back, and the facts of a stop string.

        An answer that a stop string had completed stays complete, whatever befell the engine before it knew.
        """
        state.pending.end = end
        if end.state == "completed" and state.stopped_by is None:
            state.pieces.append(state.text.finish())
            state.stopped_by = state.text.matched_stop
        if state.stopped_by is not None:
            end.state, end.error = "completed", None
            end.finish_reason = "stop"
            end.stop = state.stopped_by
            end.completion_tokens = state.used

    def _logprob(self, item: LogprobItem) -> TextLogprob:
        text, data = self.tokenizer.token_text, self.tokenizer.token_bytes
        return TextLogprob(
            text(item.token_id),
            data(item.token_id),
            item.logprob,
            [(text(i), data(i), p) for i, p in zip(item.top_ids, item.top_logprobs, strict=True)],
        )


def _take_delta(state: _State) -> TextDelta:
    """What has collected; an empty delta takes its place."""
    delta = state.pending
    delta.text = "".join(state.pieces)
    state.pending, state.pieces = TextDelta(delta.request_id), []
    return delta
