"""What each endpoint accepts. A field that is not here is refused by name; so is a value of the wrong kind.

Kinds are strict: a number is not a string, a boolean not a number. `null` stands for the default wherever there is one.
Fields of type None are OpenAI's that this version does not have: only `null` is accepted for them. Ranges of sampling
parameters are checked by `SamplingParams`. Fields that hold long or mixed lists are checked by hand in `values`, which
stops at the first fault.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from weft.core.errors import InvalidRequestError
from weft.server import values

NEUTRAL_ONLY = {
    "tools": "[] or null",
    "tool_choice": '"none" or null',
    "response_format": '{"type": "text"} or null',
    "modalities": '["text"] or null',
    "store": "false or null",
    "echo": "false or null",
}
"""Fields that are accepted only where they change nothing, with the values that do not."""

_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}


def _by_hand(check: Any, *forms: dict[str, Any]) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(check), WithJsonSchema({"anyOf": list(forms)} if len(forms) > 1 else forms[0])


Small = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
_PROMPT = _by_hand(values.prompts, _TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS})
_MESSAGES = _by_hand(values.messages, {"type": "array", "items": {"type": "object"}})
_STOP = _by_hand(values.stop_strings, _TEXT, {"type": "array", "items": _TEXT}, {"type": "null"})
_STOP_IDS = _by_hand(values.stop_token_ids, _IDS, {"type": "null"})
_LOGIT_BIAS = _by_hand(
    values.logit_bias, {"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}
)
_TEXTS = _by_hand(values.texts, _TEXT, {"type": "array", "items": _TEXT}, {"type": "null"})
_INPUT_IDS = _by_hand(values.input_ids, _IDS, {"type": "array", "items": _IDS}, {"type": "null"})
_TEMPLATE_KWARGS = _by_hand(values.template_kwargs, {"type": "object"}, {"type": "null"})
_REQUEST_ID = _by_hand(values.request_id, {"type": "integer"}, _TEXT, {"type": "null"})
_TOKENS = _by_hand(values.tokens, _IDS)
_RESUMED = _by_hand(values.resumed, _IDS)
_SESSION_RESUMED = _by_hand(values.session_resumed, _IDS)
_INPUTS = _by_hand(
    values.embedding_inputs, _TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}
)
_MORE_MESSAGES = _by_hand(values.more_messages, {"type": "array", "items": {"type": "object"}})
_VOICE_SAMPLE = _by_hand(values.voice_sample, _TEXT, {"type": "null"})
_SPEECH_FORMAT = _by_hand(values.speech_format, {"enum": ["wav", "pcm", None]})


class Strict(BaseModel):
    """Immutable, strict, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Body(Strict):
    """Base of all bodies."""

    reserved_tokens: ClassVar[int] = 1
    """Tokens of the context that a prompt has to leave."""

    noun: ClassVar[str] = "body"
    """What errors call the whole."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> type[Self]:
        """The schema that these fields are to have. Raises InvalidRequestError when there is none."""
        return cls

    def token_ids(self) -> list[tuple[str, list[int]]]:
        """All lists of token ids in it, with the names of their fields."""
        return []


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Body):
    type: Literal["text"]


class Sampling(Body):
    """Sampling parameters that all generating endpoints have under the same names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Small | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], *_LOGIT_BIAS] = {}
    seed: int | None = None
    stop: Annotated[tuple[str, ...], *_STOP] = ()
    stop_token_ids: Annotated[tuple[int, ...], *_STOP_IDS] = ()
    min_tokens: Small | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class Request(Body):
    """What all generating endpoints have besides sampling."""

    model: str | None = None
    stream: bool | None = None
    priority: Small | None = None
    timeout_s: Annotated[float, Field(gt=0, le=365 * 24 * 3600)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None


class Resume(Strict):
    """An answer that has begun elsewhere; see docs/http-api.md, For gateways."""

    token_ids: Annotated[list[int], *_RESUMED]
    chars: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    created: Annotated[int, Field(ge=0, le=2**53)] | None = None


class GeneratingRequest(Request):
    """What all endpoints have that generate text."""

    weft_resume: Resume | None = None

    def token_ids(self) -> list[tuple[str, list[int]]]:
        return [] if self.weft_resume is None else [("weft_resume", self.weft_resume.token_ids)]


class OpenAIRequest(GeneratingRequest, Sampling):
    """What chat and text completions share."""

    max_tokens: Small | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    weft: bool | None = None


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], *_MESSAGES]
    max_completion_tokens: Small | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], *_TEMPLATE_KWARGS] = {}

    echo: Literal[False] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    store: Literal[False] | None = None
    parallel_tool_calls: None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    metadata: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: None = None
    web_search_options: None = None
    verbosity: None = None
    prompt_cache_key: None = None
    prompt_cache_retention: None = None
    safety_identifier: None = None


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[values.Prompt], *_PROMPT]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Small | None = None
    suffix: None = None

    def token_ids(self) -> list[tuple[str, list[int]]]:
        own = [("prompt", prompt.token_ids) for prompt in self.prompt if prompt.token_ids is not None]
        return own + super().token_ids()


class NativeSampling(Sampling):
    """`sampling_params` of POST /generate: the names of `SamplingParams`."""

    max_new_tokens: Small | None = None
    include_stop: bool | None = None


class GenerateRequest(GeneratingRequest):
    """POST /generate. Exactly one of `text` and `input_ids`; `many` tells whether it is a list of prompts."""

    text: Annotated[values.Prompts | None, *_TEXTS] = None
    input_ids: Annotated[values.Prompts | None, *_INPUT_IDS] = None
    sampling_params: NativeSampling | None = None

    def token_ids(self) -> list[tuple[str, list[int]]]:
        prompts = [] if self.input_ids is None else self.input_ids.items
        own = [("input_ids", prompt.token_ids) for prompt in prompts if prompt.token_ids is not None]
        return own + super().token_ids()


class EmbeddingRequest(Request):
    """POST /v1/embeddings."""

    reserved_tokens: ClassVar[int] = 0

    input: Annotated[values.Prompts, *_INPUTS]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    stream: None = None

    def token_ids(self) -> list[tuple[str, list[int]]]:
        return [(where, prompt.token_ids) for where, prompt in self.places() if prompt.token_ids is not None]

    def places(self) -> list[tuple[str, values.Prompt]]:
        """Every input with its name in errors."""
        if not self.input.many:
            return [("input", self.input.items[0])]
        return [(f"input[{i}]", prompt) for i, prompt in enumerate(self.input.items)]


class SpeechRequest(Body):
    """POST /v1/audio/speech."""

    model: str | None = None
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    voice: str | None = None
    response_format: Annotated[str, *_SPEECH_FORMAT] = "wav"
    speed: Annotated[float, Field(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio"] | None = None
    instructions: None = None


class TokenizeRequest(Body):
    """POST /tokenize. Exactly one of `prompt`, `text` (the same) and `messages`."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Annotated[list[dict[str, Any]] | None, *_MESSAGES] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], *_TEMPLATE_KWARGS] = {}
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], *_TOKENS]

    def token_ids(self) -> list[tuple[str, list[int]]]:
        return [("tokens", self.tokens)]


class AbortRequest(Body):
    """POST /abort: one request by its id (`17` or `chatcmpl-17`), or all of them."""

    request_id: Annotated[int | None, *_REQUEST_ID] = None
    all: bool | None = None


class StreamingStopRequest(Body):
    """POST /streaming/stop: one session, or all of them."""

    session_id: str | None = None


class SessionFrame(Body):
    """What a client sends on /ws/streaming/{session_id}: one of the frames below, by its `type`."""

    noun: ClassVar[str] = "frame"

    type: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> type[Any]:
        kind = fields.get("type")
        schema = _FRAMES.get(kind) if isinstance(kind, str) else None
        if schema is None:
            shown = "it is needed, as text" if not isinstance(kind, str) else f"{kind[:80]!r} is not known"
            text = f"type: {shown} (allowed: {', '.join(_FRAMES)})"
            raise InvalidRequestError(text, param="type", code="unknown_type")
        return schema


class PrefillFrame(SessionFrame):
    """The next messages of the conversation; `tts_ref_audio` is a voice to speak with, float32 samples at 16 kHz."""

    messages: Annotated[list[dict[str, Any]], *_MORE_MESSAGES]
    clear_kv_cache: bool | None = None
    is_last_chunk: bool | None = None
    tts_ref_audio_base64: Annotated[Any, *_VOICE_SAMPLE] = None
    epoch: str | None = None


class SessionResume(Resume):
    """`text`: what the client has of the answer, for the conversation to hold."""

    token_ids: Annotated[list[int], *_SESSION_RESUMED]
    text: str | None = None


class GenerateFrame(SessionFrame, NativeSampling):
    """The answer is wanted."""

    generate_audio: bool | None = None
    voice: str | None = None
    speed: Annotated[float, Field(ge=0.25, le=4)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=365 * 24 * 3600)] | None = None
    priority: Small | None = None
    return_token_ids: bool | None = None
    resume: SessionResume | None = None

    def token_ids(self) -> list[tuple[str, list[int]]]:
        return [] if self.resume is None else [("resume.token_ids", self.resume.token_ids)]


class StopFrame(SessionFrame):
    """No more of this answer."""


class CloseFrame(SessionFrame):
    """No more of this connection."""


_FRAMES = {"prefill": PrefillFrame, "generate": GenerateFrame, "stop": StopFrame, "close": CloseFrame}
