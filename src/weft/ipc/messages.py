"""Every message between processes, as tagged msgspec structs.

    API --> text:    TextRequest, TextQuery, Abort          text --> API:   TextBatch, QueryReply
    text --> engine: Submit, Finish, Abort                  engine --> text: TokenBatch
    engine's step thread --> engine: Wake
    API --> engine:  EngineQuery, Abort                     engine --> API: EngineReply, Heartbeat
    any child --> API: Ready, StartFailed

Per request id the order is: one TextRequest, then any number of deltas, of which exactly the last has an `end`. An
Abort for an id that is not known (any more) is ignored, so that it may race with the end and be sent twice. Abort
reaches the engine straight (fast) and through the text process (after the Submit, however long tokenizing takes).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.core.sampling import SamplingParams


class _Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base: the tag is the class's name."""


class ErrorInfo(msgspec.Struct, omit_defaults=True):
    """A `WeftError` on its way between processes; `http_status` names its class."""

    http_status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class MediaItem(msgspec.Struct):
    """A decoded image or sound: `core.media.Medium` on its way, `data` being its samples, little-endian."""

    kind: Literal["image", "audio"]
    shape: list[int]
    digest: bytes
    data: bytes


class MediaPlace(msgspec.Struct, array_like=True):
    """Tokens [start, end) of a prompt stand for `item`."""

    start: int
    end: int
    item: MediaItem


class TextRequest(_Message):
    """One prompt to tokenize and submit, once for every id in `request_ids` (`n` answers share one tokenizing).

    Exactly one of `text`, `token_ids`, `messages` is set. The k-th id gets seed `params.seed + k` where there is one.
    `arrival_s` and `deadline_s` are on the system's monotonic clock, which all processes of one machine share.
    `adapter`: 0 for the model itself, k for the k-th of `model.lora`. `media`: what the placeholders in `messages`,
    {"type": "image"} or "audio", stand for, in their order.
    `resume_ids` (of one id that streams): the answer has begun with these tokens elsewhere; its deltas tell what comes
    after them, and of their text what lies beyond `resume_chars` characters; None: beyond what a stream shows of them.
    """

    request_ids: list[int]
    params: SamplingParams
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    stream: bool = False
    echo: bool = False
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    session_id: str | None = None
    session_ttl_s: float | None = None
    adapter: int = 0
    resume_ids: list[int] = []
    resume_chars: int | None = None
    media: list[MediaItem] = []


class TextQuery(_Message):
    """A question to the text process; its answer is a QueryReply with the same `call_id`.

    tokenize: `text` or `messages` -> {"tokens": [...], "pieces": [...], "count": n}, lists as JSON text in bytes;
    detokenize: `token_ids` -> {"text": ...}. `media` as in TextRequest, though only their kinds and shapes count.
    """

    call_id: int
    op: Literal["tokenize", "detokenize"]
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    add_special_tokens: bool = True
    template_kwargs: dict[str, Any] = {}
    media: list[MediaItem] = []


class Submit(_Message):
    """A tokenized request for the engine; token ids are the bytes of an int32 array.

    `resume_ids`: what was generated for it before it came here. `complete`: a stop string was found in their text.
    """

    request_id: int
    token_ids: bytes
    params: SamplingParams
    reply_to: int = 0  # which text worker detokenizes it
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    session_id: str | None = None
    session_ttl_s: float | None = None
    adapter: int = 0
    resume_ids: bytes = b""
    complete: bool = False
    media: list[MediaPlace] = []


class Finish(_Message):
    """A stop string was found: the request is complete and what it generated since does not count."""

    request_id: int


class Abort(_Message):
    """The client is gone or does not want these requests any more.

    `sent_s`: when that was known, on the system's monotonic clock; `abort_latency` is measured from here.
    """

    request_ids: list[int]
    sent_s: float | None = None


class Wake(_Message):
    """A step has ended: the thread that computed it says so to the engine's loop."""


class EngineQuery(_Message):
    """A question to the engine; its answer is an EngineReply with the same `call_id`.

    stats -> the JSON of GET /stats; flush_cache -> {"flushed_tokens"}; metrics -> {"counters", "gauges", "histograms"};
    requests -> {"requests": [...]}, live and recent; request, with `request_id` -> one of them;
    sessions -> {"sessions": [...]}; end_session, with `session_id` -> {"ended", "aborted"};
    cache -> the JSON of GET /v1/cache.
    """

    call_id: int
    op: Literal["stats", "flush_cache", "metrics", "requests", "request", "sessions", "end_session", "cache"]
    request_id: int | None = None
    session_id: str | None = None


class LogprobItem(msgspec.Struct, array_like=True):
    """Log probability of one token and of the likeliest ones, best first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class CacheMissInfo(msgspec.Struct):
    """Why not more of a prompt was cached: `reason` is never_seen, evicted, diverged or not_used, at `at_token`."""

    reason: str
    at_token: int


class End(msgspec.Struct, omit_defaults=True):
    """How a request ended, with the numbers for `usage`.

    `state` is a terminal `RequestState` value; `finish_reason` is set when it is "completed", `error` otherwise.
    `stop` is the stop string, or the token id, that ended the text (not set for the model's own end token).
    """

    state: str
    finish_reason: str | None = None
    stop: str | int | None = None
    error: ErrorInfo | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    retractions: int = 0
    miss: CacheMissInfo | None = None


class TokenOutput(msgspec.Struct, omit_defaults=True):
    """What one step gave one request. An end token that ended it is in `tokens`, and in `end_token`, too.

    `embedding`: the prompt's vector, float32 in little-endian bytes.
    """

    request_id: int
    tokens: list[int] = []
    logprobs: list[LogprobItem] | None = None
    prompt_logprobs: list[LogprobItem] | None = None
    end_token: int | None = None
    end: End | None = None
    embedding: bytes | None = None


class TokenBatch(_Message):
    """What one step gave, for the requests of one text worker."""

    outputs: list[TokenOutput]


class TextLogprob(msgspec.Struct, array_like=True):
    """A LogprobItem with its texts: `token`, its bytes, and (text, bytes, logprob) of the likeliest."""

    token: str
    token_bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float]]


class TextDelta(msgspec.Struct, omit_defaults=True):
    """New text of one request; `token_ids` are those that came since the last delta (an end token is not among them).

    The first delta with `prompt_logprobs` has one entry per prompt token, None for the first token.
    `prompt_text` is set in the first delta of a request with `echo`. `embedding` is `TokenOutput`'s, in the last one.
    `resumed_bytes`: those of all tokens that it was resumed with, in the first delta, where there are `logprobs`.
    """

    request_id: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TextLogprob] | None = None
    prompt_text: str | None = None
    prompt_logprobs: list[TextLogprob | None] | None = None
    end: End | None = None
    embedding: bytes | None = None
    resumed_bytes: bytes = b""


class TextBatch(_Message):
    deltas: list[TextDelta]


class QueryReply(_Message):
    call_id: int
    result: dict[str, Any] = {}
    error: ErrorInfo | None = None


class EngineReply(_Message):
    call_id: int
    result: dict[str, Any] = {}
    error: ErrorInfo | None = None


class Heartbeat(_Message):
    """A child's loop turned: sent once a second, and by the loop itself, so that a hung loop is silent.

    From the engine also how it is, for whoever chooses between workers: `retry_after_s` is how long until half of the
    queue is worked off, from the uncached tokens of all waiting requests and the measured speed; `wait_s` until all of
    it is; `prompt_tokens_per_s` is None while it is not known; `held_tokens` are those whose KV it has; `sessions`
    those whose KV is kept for them.
    """

    role: str
    steps: int = 0
    queued: int = 0
    retry_after_s: float = 1.0
    wait_s: float = 0.0
    prompt_tokens_per_s: float | None = None
    held_tokens: int = 0
    sessions: int = 0


class Ready(_Message):
    """A child can work. `facts`: for the engine backend, KV tokens, geometry; for text vocabulary and template."""

    role: str
    facts: dict[str, Any] = {}


class StartFailed(_Message):
    """A child could not start; `exit_code` is 2 for settings and checkpoints, 1 for all else."""

    role: str
    message: str
    exit_code: int = 1


ToText = TextRequest | TextQuery | Abort | TokenBatch
ToEngine = Submit | Finish | Abort | EngineQuery | Wake
ToApi = TextBatch | QueryReply | EngineReply | Heartbeat | Ready | StartFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_text = msgspec.msgpack.Decoder(ToText).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_api = msgspec.msgpack.Decoder(ToApi).decode
