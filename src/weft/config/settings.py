"""The tree of settings: every key, its type, range, default and meaning.

Only settings that this version implements are here: a key that would be accepted and ignored does not exist. The
`Meta` of a field is the one source for validation, for error texts and for docs/configuration.md. `auto` stays the
word "auto" in this tree; the engine turns it into a number once the model's geometry is known.

Structs are frozen. Constructing one directly checks nothing: settings that come from people go through
`weft.config.resolve`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Auto = Literal["auto"]

MAX_TOKENS = 2**40
MAX_SECONDS = 365 * 24 * 3600

TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
RowCount = Annotated[int, Meta(ge=1, le=65536)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
NonEmpty = Annotated[str, Meta(min_length=1)]
ApiKey = Annotated[str, Meta(pattern=r"\A[!-~]+\Z")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, named fields only, unknown keys refused."""


class ModelSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is served, and in which form."""

    path: Annotated[
        NonEmpty | None,
        Meta(
            description="Checkpoint folder in Hugging Face's form, or a GGUF file (the first one, where there are "
            "several). `null`: the bundled demo model."
        ),
    ] = None
    served_name: Annotated[
        NonEmpty | None,
        Meta(description="The model's name in the API. `null`: the name of its folder or file."),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Number format of weights and KV. `auto`: what the checkpoint says, where the device has it."),
    ] = "auto"
    max_context_tokens: Annotated[
        TokenCount | Auto,
        Meta(
            description="Longest sequence, prompt and output together. `auto`: what the model's positions allow; of an "
            "embedding model, which computes a text in one piece, 8192 at most."
        ),
    ] = "auto"
    chat_template: Annotated[
        NonEmpty | None,
        Meta(description="File with a Jinja chat template. `null`: the one that comes with the model."),
    ] = None
    lora: Annotated[
        dict[NonEmpty, NonEmpty],
        Meta(
            description="LoRA adapters in GGUF form, by name. A request that gives such a name as its `model` is "
            "answered with the adapter on top of the model. The llama_cpp engine has them.",
            extra={"allowed": "mapping of name to file"},
        ),
    ] = msgspec.field(default_factory=dict)

    @property
    def public_name(self) -> str:
        """The model's name in the API."""
        if self.served_name is not None:
            return self.served_name
        return "weft-demo" if self.path is None else Path(self.path).resolve().name.removesuffix(".gguf")


class HttpSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker's HTTP server, its queue and its time limits."""

    host: Annotated[NonEmpty, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        Meta(description="Port to listen on; 0 takes any free one."),
    ] = 8000
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        Meta(description="Open connections; one more is closed as soon as it is accepted."),
    ] = 1024
    max_sessions: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)],
        Meta(
            description="Conversations of streaming sessions that are kept; for one more, the one unused for longest "
            "gives way. 1: one conversation at a time, and `clear_kv_cache` forgets all KV."
        ),
    ] = 256
    max_queue_size: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        Meta(description="Requests that may wait; one more is refused with 429 and `Retry-After`."),
    ] = 256
    max_concurrent_requests: Annotated[
        RowCount | Auto,
        Meta(
            description="Size of the running set (PENDING and PROCESSING). `auto`: chosen for the device, 64 on a CPU."
        ),
    ] = "auto"
    request_timeout_s: Annotated[
        Seconds | None,
        Meta(description="Longest time in the running set; beyond it the request ends with 408. `null`: no limit."),
    ] = 60.0
    queue_timeout_s: Annotated[
        Seconds | None,
        Meta(description="Longest time in the waiting queue; beyond it the request ends with 408. `null`: no limit."),
    ] = None
    drain_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_SECONDS)],
        Meta(description="After the first SIGTERM or Ctrl-C, running requests have this long to finish."),
    ] = 30.0
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=2**40)],
        Meta(description="Largest request body; beyond it 413."),
    ] = 33_554_432
    sse_keep_alive_s: Annotated[
        Seconds,
        Meta(description="A stream without news sends its headers, and then a comment, after this long."),
    ] = 15.0
    api_keys: Annotated[
        tuple[ApiKey, ...],
        Meta(
            description="Keys that clients must send as `Authorization: Bearer KEY`. Empty: open to everybody.",
            extra={"secret": True, "allowed": "list of keys of visible ASCII characters"},
        ),
    ] = ()

    def __repr__(self) -> str:
        """As msgspec's, but without the keys: a repr may end up in a log."""
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__)
        parts = (f"{name}={tuple('***' for _ in v) if name == 'api_keys' else v!r}" for name, v in shown)
        return f"HttpSettings({', '.join(parts)})"


class SchedulerSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who runs next, and how much of it in one step."""

    policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random"],
        Meta(
            description="Order of waiting requests: `fcfs` by arrival, `lpm` longest cached prefix first, `dfs-weight` "
            "branch by branch of the cached tree, the branch that most wait for first, `lof` longest output first, "
            "`random` in an order that `scheduler.seed` fixes. Under all of them every eighth place goes to whoever "
            "has waited longest."
        ),
    ] = "lpm"
    priority: Annotated[
        bool,
        Meta(description="Requests may carry `priority`; the lower number runs first, before the policy's order."),
    ] = False
    max_batch_size: Annotated[
        RowCount | Auto,
        Meta(description="Most requests in one step. `auto`: as many as `http.max_concurrent_requests`."),
    ] = "auto"
    max_prefill_tokens: Annotated[
        TokenCount | Auto,
        Meta(description="Most prompt tokens in one step, over all its requests. `auto`: chosen for the device."),
    ] = "auto"
    chunked_prefill_size: Annotated[
        TokenCount | Auto | None,
        Meta(
            description="A longer prompt is computed in pieces of this many tokens. `null`: never cut. "
            "`auto`: chosen for the device."
        ),
    ] = "auto"
    mixed: Annotated[
        bool,
        Meta(description="Running requests take their next token in the same step in which prompts are computed."),
    ] = True
    overlap: Annotated[
        bool | Auto,
        Meta(
            description="Plan the next step while one runs. The tokens are the same either way. `auto`: on CUDA, where "
            "planning would leave the device idle; on a CPU a new request would wait a step longer."
        ),
    ] = "auto"
    max_input_tokens: Annotated[
        TokenCount | None,
        Meta(description="Longest prompt; beyond it 400. `null`: what the context and the KV cache hold."),
    ] = None
    max_output_tokens: Annotated[
        TokenCount | None,
        Meta(description="Most tokens that one request may ask for. `null`: what the context and the KV cache hold."),
    ] = None
    max_decode_stall_ms: Annotated[
        Annotated[int, Meta(ge=10, le=600_000)] | Auto | None,
        Meta(
            description="How long a step with running streams may take for the sake of somebody's prompt: fewer prompt "
            "tokens ride along, as measured speed says. `auto`: 200 on a CPU, no limit on CUDA. `null`: no limit."
        ),
    ] = "auto"
    deadline_scan_s: Annotated[
        Annotated[float, Meta(ge=0.5, le=5)],
        Meta(description="How often deadlines are checked, also while a step runs."),
    ] = 1.0
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)],
        Meta(description="Start of the random numbers of requests that bring no `seed` of their own."),
    ] = 0


class KvCacheSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV cache: how large, in which pages, and what stays after a request. The lower of the two limits holds."""

    max_items: Annotated[
        TokenCount | Auto,
        Meta(description="Most tokens whose keys and values are kept. `auto`: what the memory limit allows."),
    ] = "auto"
    max_memory_mb: Annotated[
        Annotated[int, Meta(ge=1, le=2**30)] | Auto,
        Meta(description="Most memory for keys and values, in MiB. `auto`: a share of what the device has free."),
    ] = "auto"
    page_size: Annotated[
        Literal[1, 2, 4, 8, 16, 32, 64, 128, 256],
        Meta(description="Tokens in a page, the unit in which the cache is given out and shared."),
    ] = 1
    eviction_policy: Annotated[
        Literal["lru", "lfu", "fifo"],
        Meta(
            description="What is forgotten first: `lru` what was used longest ago, `lfu` what was used least often, "
            "`fifo` what was computed first."
        ),
    ] = "lru"
    eviction_threshold: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(
            description="Above this share of the cache, what nobody uses is forgotten, so that a new request finds "
            "room at once."
        ),
    ] = 0.8
    cleanup_interval_s: Annotated[
        Annotated[float, Meta(ge=0.1, le=3600)],
        Meta(description="How often the threshold is checked, besides whenever the cache grows."),
    ] = 1.0
    session_ttl_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)],
        Meta(
            description="How long a session's KV is kept after its last request, unless the request says otherwise "
            "with `X-Session-TTL`."
        ),
    ] = 600.0
    kv_type: Annotated[
        Literal["auto", "f16", "bf16", "q8_0", "q4_0"],
        Meta(
            description="Number format of K and V in the llama.cpp engine; `auto`: f16. The others keep them in "
            "`model.dtype`."
        ),
    ] = "auto"
    host_memory_mb: Annotated[
        Annotated[int, Meta(ge=0, le=2**30)] | Auto,
        Meta(
            description="A second tier in the host's memory, in MiB: what has no room, and what is cold beyond "
            "`resident_tokens`, goes there and comes back when a prompt wants it. 0: none. `auto`: for the llama.cpp "
            "engine up to a quarter of the free memory, taken as it fills; the others have none."
        ),
    ] = "auto"
    resident_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | Auto,
        Meta(
            description="With a second tier: cached tokens that nobody uses and that stay with the engine all the "
            "same. Each of them slows every step a little. `auto`: 1024."
        ),
    ] = "auto"
    retain: Annotated[
        Literal["prefix", "none"],
        Meta(description="`prefix`: what a request computed stays for the next one until room is needed. `none`: not."),
    ] = "prefix"


class TextSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokenizing and detokenizing."""

    num_tokenizers: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        Meta(description="Processes that tokenize and detokenize. 0, like 1: a single one does all of it."),
    ] = 0


class TorchSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The PyTorch engine."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where the model runs. `auto`: CUDA where there is one, else the CPU."),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "sdpa"],
        Meta(description="Attention kernels. `auto`: the best for the hardware."),
    ] = "auto"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="Threads on the CPU. `auto`: one for models under 64 MiB, else PyTorch's own choice."),
    ] = "auto"


class LlamaCppSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The llama.cpp engine."""

    n_seq_max: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto,
        Meta(
            description="Sequence ids: one for each request in a batch, one for each cached branch. Requests that find "
            "none wait. `auto`: `http.max_concurrent_requests` and room for three times as many branches, 32 at least. "
            "Of an embedding model, texts computed at once; `auto`: `scheduler.max_batch_size`."
        ),
    ] = "auto"
    n_batch: Annotated[
        Annotated[int, Meta(ge=1, le=65536)],
        Meta(description="Most tokens that llama.cpp computes at once."),
    ] = 512
    n_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="Threads on the CPU. `auto`: one for models under 64 MiB, else all that the process may use."),
    ] = "auto"
    n_gpu_layers: Annotated[
        Annotated[int, Meta(ge=0, le=100_000)] | Auto,
        Meta(description="Layers on the GPU. `auto`: all, where llama-cpp-python was built for one."),
    ] = "auto"
    flash_attn: Annotated[
        bool | Auto,
        Meta(description="llama.cpp's flash attention. `auto`: its own choice; on for a quantised `kv_cache.kv_type`."),
    ] = "auto"


class FakeSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fake engine: deterministic tokens without a model, for tests of everything around an engine."""

    tokens_per_s: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        Meta(
            description="Speed in tokens per second, prompts included, over all requests. `null`: as fast as it goes."
        ),
    ] = None
    vocab: Annotated[
        Annotated[int, Meta(ge=2, le=2**20)],
        Meta(description="Size of its vocabulary, at most the tokenizer's."),
    ] = 32000
    embeddings: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(description="Dimensions of its vectors, as an embedding model. `null`: it generates text."),
    ] = None
    modalities: Annotated[
        tuple[Literal["image", "audio"], ...],
        Meta(
            description="What it takes besides text. Its answers then depend on what is shown to it; a chat template "
            "has to write `<|image|>` or `<|audio|>` for each.",
            extra={"allowed": "list of image, audio"},
        ),
    ] = ()
    faults: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=2**31 - 1)]],
        Meta(
            description="Faults to inject: for each, by name, the token that sets it off when it is computed.",
            extra={"allowed": "mapping of fault to token id"},
        ),
    ] = msgspec.field(default_factory=dict)


class BackendSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine computes, and the settings of each one. Those of an engine that is not chosen do nothing."""

    name: Annotated[
        Literal["auto", "torch", "llama_cpp", "fake"],
        Meta(description="The engine. `auto`: llama_cpp for a GGUF file, else torch."),
    ] = "auto"
    torch: TorchSettings = msgspec.field(default_factory=TorchSettings)
    llama_cpp: LlamaCppSettings = msgspec.field(default_factory=LlamaCppSettings)
    fake: FakeSettings = msgspec.field(default_factory=FakeSettings)


class SpeechSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text to audio."""

    engine: Annotated[
        Literal["auto", "espeak", "piper", "none"],
        Meta(
            description="What speaks. `auto`: piper where `speech.piper_voice` is set; else espeak where the extra "
            "`weft[speech]` is installed; else nothing."
        ),
    ] = "auto"
    piper_voice: Annotated[
        NonEmpty | None,
        Meta(
            description="A Piper voice: the .onnx file, with its .onnx.json beside it. Needs the extra `weft[piper]`."
        ),
    ] = None
    voice: Annotated[
        NonEmpty,
        Meta(
            description="The voice of requests that name none, such as `en-us`, or of a Piper voice with several "
            "speakers the name of one. `auto`: espeak goes by the text, Mandarin for Chinese characters, else American "
            "English; a Piper voice has its default speaker."
        ),
    ] = "auto"


class MediaSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of images and sounds in chats, where the engine takes any.

    Decoded, a pixel takes 3 bytes and a second 64 kB.
    """

    max_image_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=2**30)],
        Meta(description="Largest image, in the bytes of its file."),
    ] = 16_777_216
    max_image_pixels: Annotated[
        Annotated[int, Meta(ge=1, le=2**26)],
        Meta(description="Most pixels of all images of one request together."),
    ] = 33_554_432
    max_audio_s: Annotated[
        Annotated[float, Meta(gt=0, le=24 * 3600)],
        Meta(description="Most seconds of all sounds of one request together."),
    ] = 600.0
    max_parts: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)],
        Meta(description="Most images and sounds of one request."),
    ] = 64


class GatewaySettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway before several workers; a worker has no use for these."""

    max_queue_size: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)],
        Meta(description="Requests and sessions' turns that wait for a worker; beyond: 429."),
    ] = 1000
    health_interval_s: Annotated[
        Annotated[float, Meta(ge=0.1, le=3600)],
        Meta(description="How often each worker is asked how it is, besides at once after a failure."),
    ] = 10.0
    worker_lease_s: Annotated[
        Annotated[float, Meta(ge=1, le=86400)],
        Meta(
            description="A place on a worker that shows no sign of life for so long is taken back: its request ends "
            "with an error, so that no place is ever lost."
        ),
    ] = 300.0
    eta_ema_alpha: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="Weight of the newest turn in the moving average that waiting times are estimated from."),
    ] = 0.3
    retries: Annotated[
        Annotated[int, Meta(ge=0, le=100)],
        Meta(description="How often a request is taken to another worker after the one that had it failed."),
    ] = 2


class EngineSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine process."""

    heartbeat_s: Annotated[
        Annotated[float, Meta(ge=0.5, le=3600)],
        Meta(
            description="A process that is silent for this long is taken for hung and killed; so is an engine whose "
            "step takes more than six times as long."
        ),
    ] = 10.0
    record: Annotated[
        NonEmpty | None,
        Meta(
            description="File to which every arrival and every decision is written, for `weft simulate FILE`. It "
            "contains the prompts' tokens. A file that is there gets `.1` at its end. `null`: nothing is written."
        ),
    ] = None
    restart: Annotated[
        bool,
        Meta(
            description="After the engine or a text process died, start them again and serve on, instead of ending "
            "with exit code 1. Open requests end with an error either way."
        ),
    ] = False


class LogSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged on stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least important level that is logged."),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="`text` for people, `json` for machines, one object a line."),
    ] = "text"


class Settings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree. Immutable; passed down, never looked up."""

    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    http: HttpSettings = msgspec.field(default_factory=HttpSettings)
    scheduler: SchedulerSettings = msgspec.field(default_factory=SchedulerSettings)
    kv_cache: KvCacheSettings = msgspec.field(default_factory=KvCacheSettings)
    text: TextSettings = msgspec.field(default_factory=TextSettings)
    backend: BackendSettings = msgspec.field(default_factory=BackendSettings)
    speech: SpeechSettings = msgspec.field(default_factory=SpeechSettings)
    media: MediaSettings = msgspec.field(default_factory=MediaSettings)
    gateway: GatewaySettings = msgspec.field(default_factory=GatewaySettings)
    engine: EngineSettings = msgspec.field(default_factory=EngineSettings)
    log: LogSettings = msgspec.field(default_factory=LogSettings)
