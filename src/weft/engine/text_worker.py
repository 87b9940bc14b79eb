"""`TextWorker`: everything that turns text into tokens and tokens into text, without any I/O.

The text process and `LLM` both run it. `prepare` and `answer` may run in other threads than the rest; a request's state
exists from before its Submit is sent until its `end` has come back from the engine.

A prompt that is far too long is refused after a glance at it: tokenizing takes time, and some 400 bytes of memory for
each character, whether or not the result is of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.engine.deltas import ENTRIES_AT_ONCE, num_entries
from weft.ipc.messages import (
    End,
    LogprobItem,
    MediaPlace,
    Submit,
    TextDelta,
    TextLogprob,
    TextQuery,
    TextRequest,
    TokenOutput,
)
from weft.text.placeholders import Placeholders, expanded
from weft.text.stream import TextStream
from weft.text.tokenizer import BaseTokenizer

TOKENS_PER_CONTEXT = 4
"""/tokenize takes texts of up to so many times the longest prompt."""

MAX_SCORED = 1 << 18
"""Log probabilities of one prompt, those of the likeliest tokens counted; more is refused by a server."""

_TYPICAL_CHARS = 4  # of a token; a text with more of them for each token that is allowed is first counted in pieces
_PIECE_CHARS = 1 << 16
_CUT_TOKENS = 16  # by which the count may be too high for each place where the text was cut


@dataclass(slots=True)
class _State:
    """One request between its Submit and its end.

    `pending` and `pieces`, its text, collect what the next delta will tell (all of it, for an unstreamed request);
    `used` counts the tokens up to the one that completed a stop string, those that it was resumed with too. Of the text
    that comes, the client has the first `skip` characters; it has what a stream shows of the first `told` tokens.
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
    prompt_logprobs: list[TextLogprob] = field(default_factory=list)
    told: int = 0
    skip: int = 0


class TextWorker:
    """See the module's docstring.

    `index` tells the engine where a request's tokens go. `max_prompt_tokens` is the longest prompt that the engine
    could take, if it is known; what the engine takes now is for it to judge. `placeholders` are those of the media that
    it takes.
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        index: int = 0,
        *,
        max_prompt_tokens: int | None = None,
        placeholders: Placeholders | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._placeholders = placeholders or {}
        self._index = index
        self._max_prompt_tokens = max_prompt_tokens
        self._shown: dict[int, tuple[str, bytes]] = {}
        self._states: dict[int, _State] = {}

    @property
    def open_requests(self) -> int:
        return len(self._states)

    # ---- text to tokens ---------------------------------------------------------------------------------------

    def prepare(self, request: TextRequest) -> list[Submit]:
        """Tokenizes a request and opens its state, once for each id. Raises InvalidRequestError."""
        prompt_ids, spans = self._prompt_ids(request)
        return self.open(request, prompt_ids, spans)

    def open(self, request: TextRequest, prompt_ids: list[int], spans: Sequence[tuple[int, int]] = ()) -> list[Submit]:
        """Opens the state of a request whose prompt is tokenized; returns what the engine is to be sent.

        `spans`: the tokens [start, end) that stand for each of the request's media.
        """
        media = [MediaPlace(*span, item) for span, item in zip(spans, request.media, strict=True)]
        self._check_scored(request.params, len(prompt_ids))
        if request.resume_ids or request.resume_chars is not None:
            self._check_resumed(request)
        echoed = self._echoed(request, prompt_ids) if request.echo else None
        packed = np.asarray(prompt_ids, dtype=np.int32).tobytes()
        states: dict[int, _State] = {}
        submits: list[Submit] = []
        for offset, request_id in enumerate(request.request_ids):
            params = request.params
            if params.seed is not None and offset:
                params = params.with_seed((params.seed + offset) % 2**64)
            state = states[request_id] = _State(
                text=self._stream(request, prompt_ids),
                streaming=request.stream,
                wants_logprobs=params.logprobs is not None,
                wants_prompt_logprobs=params.prompt_logprobs is not None,
                pending=TextDelta(request_id, prompt_text=echoed),
            )
            if request.resume_ids:
                self._resume(state, request, prompt_ids)
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
                    request.adapter,
                    np.asarray(request.resume_ids, dtype=np.int32).tobytes(),
                    state.finish_sent,
                    media,
                )
            )
        self._states.update(states)  # all or none: an error above leaves nothing behind
        return submits

    def _stream(self, request: TextRequest, prompt_ids: list[int]) -> TextStream:
        params = request.params
        return TextStream(
            self.tokenizer,
            prompt_ids=prompt_ids[-16:] if request.messages is None else (),
            stops=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )

    def _resume(self, state: _State, request: TextRequest, prompt_ids: list[int]) -> None:
        """Brings a fresh state to where these tokens had brought it. Raises InvalidRequestError."""
        ids, chars = request.resume_ids, request.resume_chars
        piece = state.text.push(ids)
        state.used = piece.tokens_used
        state.stopped_by = piece.matched_stop
        state.finish_sent = state.stopped_by is not None  # the Submit says so
        if state.wants_logprobs:
            state.pending.resumed_bytes = b"".join(map(self.tokenizer.token_bytes, ids))
        if chars is None:
            state.told = len(ids)
            return
        state.pieces.append(piece.text[chars:])
        if chars > len(piece.text):  # the client may have what was held back, if there is as much of it
            whole = self._stream(request, prompt_ids)
            length = len(whole.push(ids).text) + len(whole.finish())
            if chars > length:
                raise InvalidRequestError(
                    f"weft_resume.chars: {chars} is not allowed (allowed: 0 to {length}, the length of the text of"
                    f" its {len(ids)} tokens)",
                    param="weft_resume.chars",
                )
            state.skip = chars - len(piece.text)

    def _check_resumed(self, request: TextRequest) -> None:
        """Raises InvalidRequestError where an answer cannot go on; what only the engine knows, it judges."""
        for token in request.resume_ids:
            if not 0 <= token < 2**31:  # as of a prompt's
                text = f"weft_resume: token id {token} is not in the vocabulary"
                raise InvalidRequestError(text, param="weft_resume")
        if len(request.request_ids) != 1 or not request.stream or request.echo or request.params.embed:
            text = "weft_resume: only allowed for one answer that streams, and without echo"
            raise InvalidRequestError(text, param="weft_resume")
        if request.resume_chars and (request.resume_chars < 0 or not request.resume_ids):
            text = f"weft_resume.chars: {request.resume_chars} is not allowed (allowed: 0, of no tokens)"
            raise InvalidRequestError(text, param="weft_resume.chars")

    def answer(self, query: TextQuery) -> dict[str, Any]:
        """The result of a tokenize or detokenize query. Raises InvalidRequestError."""
        if query.op == "detokenize":
            ids = query.token_ids or []
            self._check_ids(ids, "tokens")
            return {"text": self.tokenizer.decode(ids, skip_special_tokens=False)}
        most = self._max_prompt_tokens
        ids, _ = self._tokenize(query, None if most is None else TOKENS_PER_CONTEXT * most)
        return {"count": len(ids), "tokens": ids, "pieces": [self._show(i)[0] for i in ids]}

    def _prompt_ids(self, request: TextRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """A prompt's token ids, and which of them stand for its media."""
        if request.token_ids is None:
            return self._tokenize(request, self._max_prompt_tokens)
        for token in request.token_ids:
            if not 0 <= token < 2**31:  # the engine judges by its vocabulary; here it must only fit an int32
                raise InvalidRequestError(f"prompt: token id {token} is not in the vocabulary", param="prompt")
        return request.token_ids, []

    def _tokenize(
        self, source: TextRequest | TextQuery, max_tokens: int | None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        if source.messages is None:
            text, add_special_tokens = source.text or "", source.add_special_tokens
        else:
            variables = dict(source.template_kwargs)
            prompt_follows = bool(variables.pop("add_generation_prompt", True))
            text = self.tokenizer.chat_text(
                source.messages, add_generation_prompt=prompt_follows, template_kwargs=variables
            )
            add_special_tokens = False
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        if source.messages is None or not self._placeholders:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens), []
        media = [(item.kind, item.shape) for item in source.media]
        return expanded(
            text, media, self._placeholders, lambda piece: self.tokenizer.encode(piece, add_special_tokens=False)
        )

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuses a text that surely has more tokens, as soon as so many are counted in pieces of it."""
        if len(text) <= _TYPICAL_CHARS * max_tokens:
            return
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            count += len(self.tokenizer.encode(piece, add_special_tokens=False)) - _CUT_TOKENS
            if count > max_tokens:
                raise InvalidRequestError(
                    f"prompt: it has more than {count} tokens ({len(text)} characters), but at most {max_tokens} are"
                    " allowed",
                    param="prompt",
                    code="context_length_exceeded",
                )

    def _check_scored(self, params: SamplingParams, prompt_tokens: int) -> None:
        if self._max_prompt_tokens is None or params.prompt_logprobs is None:
            return
        most = MAX_SCORED // (1 + params.prompt_logprobs)
        if prompt_tokens > most:
            raise InvalidRequestError(
                f"logprobs: {params.prompt_logprobs} for each token of a prompt of {prompt_tokens} are too many"
                f" (allowed: a prompt of {most} tokens)",
                param="logprobs",
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

    def is_open(self, request_id: int) -> bool:
        return request_id in self._states

    def forget(self, request_id: int) -> None:
        """Drops a request's state; what the engine still says about it is then ignored."""
        self._states.pop(request_id, None)

    # ---- tokens to text ---------------------------------------------------------------------------------------

    def push(self, output: TokenOutput) -> tuple[TextDelta | None, bool]:
        """Takes what a step gave one request.

        Returns the delta that the client is to be sent now, if any, and whether the engine must be told that the text
        is complete (`Finish`).
        """
        complete = self.absorb(output)
        return self.take(output.request_id), complete

    def absorb(self, output: TokenOutput) -> bool:
        """The first half of `push`: several outputs of one request may become one delta."""
        state = self._states.get(output.request_id)
        if state is None:
            return False
        if output.prompt_logprobs is not None:
            state.prompt_logprobs.extend(map(self._logprob, output.prompt_logprobs))
        self._push_tokens(state, output)
        state.pending.embedding = output.embedding
        if output.end is not None:
            self._finish(state, output.end)
            return False
        tell_engine = state.stopped_by is not None and not state.finish_sent
        state.finish_sent = state.finish_sent or tell_engine
        return tell_engine

    def take(self, request_id: int) -> TextDelta | None:
        """The second half of `push`: what has collected for the client, if it is to be sent now."""
        state = self._states.get(request_id)
        if state is None:
            return None
        if state.pending.end is not None:
            del self._states[request_id]
            return _take_delta(state)
        if state.streaming:
            news = any(state.pieces) or state.pending.token_ids or state.pending.prompt_logprobs
        else:
            news = num_entries(state.pending) >= ENTRIES_AT_ONCE
        return _take_delta(state) if news else None

    def _push_tokens(self, state: _State, output: TokenOutput) -> None:
        ids = output.tokens if output.end_token is None else output.tokens[:-1]
        if not output.tokens or state.stopped_by is not None:
            return
        if state.wants_prompt_logprobs:
            state.pending.prompt_logprobs = [None, *state.prompt_logprobs]
            state.prompt_logprobs, state.wants_prompt_logprobs = [], False
        piece = state.text.push(ids)
        state.used += piece.tokens_used
        state.stopped_by = piece.matched_stop
        _add_text(state, piece.text)
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
            rest = state.text.finish()
            if end.finish_reason != "length" or state.used != state.told:  # else it came with the last of those tokens
                _add_text(state, rest)
            state.stopped_by = state.text.matched_stop
        if state.stopped_by is not None:
            end.state, end.error = "completed", None
            end.finish_reason = "stop"
            end.stop = state.stopped_by
            end.completion_tokens = state.used

    def _logprob(self, item: LogprobItem) -> TextLogprob:
        show = self._show
        return TextLogprob(
            *show(item.token_id),
            item.logprob,
            [(*show(i), p) for i, p in zip(item.top_ids, item.top_logprobs, strict=True)],
        )

    def _show(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes, remembered."""
        shown = self._shown.get(token_id)
        if shown is None:
            shown = self.tokenizer.token_text(token_id), self.tokenizer.token_bytes(token_id)
            self._shown[token_id] = shown
        return shown


def _add_text(state: _State, text: str) -> None:
    """Text for the client, but for what it has."""
    if state.skip:
        text, state.skip = text[state.skip :], max(0, state.skip - len(text))
    state.pieces.append(text)


def _take_delta(state: _State) -> TextDelta:
    """What has collected; an empty delta takes its place."""
    delta = state.pending
    delta.text = "".join(state.pieces)
    state.pending, state.pieces = TextDelta(delta.request_id), []
    return delta
