"""What a simulation is told, as plain dataclasses; and how `name=value` words from a command line fill them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from weft.core.errors import SettingsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a step takes, in seconds: a line fitted to what engines of a kind do.

    Attributes:
        step: of every step, whatever is in it.
        prompt_token: more for each prompt token (a row's new tokens, where it has more than one).
        decode_row: more for each row of one token.
        context_token: more for each token of context that attention reads, over all rows.
        host: planning and handing over, before the step starts; hidden by the step before with overlap.
    """

    step: float = 0.006
    prompt_token: float = 0.00003
    decode_row: float = 0.00002
    context_token: float = 0.00000004
    host: float = 0.0005


COSTS = {
    # 8 billion parameters in bfloat16 on a GPU with some 3 TB/s and 500 usable TFLOP/s: all weights are read in 6 ms,
    # 33,000 prompt tokens a second, 128 KiB of KV per token of context.
    "gpu": Cost(),
    # 1 billion parameters in bfloat16 on a CPU with some 80 GB/s and 1 TFLOP/s: all weights are read in 25 ms, 400
    # prompt tokens a second, 32 KiB of KV per token of context.
    "cpu": Cost(step=0.025, prompt_token=0.0025, decode_row=0.0020, context_token=0.0000004, host=0.0005),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Who comes, when, and with what. Tokens and seconds; means unless it says otherwise.

    Attributes:
        load: arrivals as a share of what the cost model can serve; counts where `rate` is 0.
        rate: arriving requests per second.
        arrivals: "poisson": conversations come one by one; "bursty": in bursts of `burst` within `burst_s`.
        families, family_tokens: prompts begin with the text of one of so many families, of such length.
        alone: share of conversations that belong to no family.
        turns: per conversation; a turn's prompt is the one before, its answer, and new words.
        think_s: between an answer and the next turn.
        new_tokens: new words of a turn.
        output_tokens, output_spread: median and log-normal spread of the output's length.
        open_ended: share without `max_tokens`; half of these are ended by a stop string, the others by an end token.
        greedy: share with temperature 0.
        sessions: share of conversations with a session id; one in four ends its session itself.
        priorities: levels of priority.
    """

    load: float = 0.8
    rate: float = 0.0
    arrivals: Literal["poisson", "bursty"] = "poisson"
    burst: int = 16
    burst_s: float = 0.2
    families: int = 12
    family_tokens: int = 64
    alone: float = 0.2
    turns: float = 2.0
    think_s: float = 1.0
    new_tokens: int = 24
    output_tokens: int = 4
    output_spread: float = 1.0
    open_ended: float = 0.05
    greedy: float = 0.5
    sessions: float = 0.1
    priorities: int = 3


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often; 0: never.

    Attributes:
        cancel: share of requests whose client goes away: at once, while it waits, mid-prompt, after some tokens (and so
            with a step in flight), or just after the end.
        timeout: share with a deadline of their own that is tight.
        crash: share of steps that the engine fails as a whole.
        bad_row: share of steps in which one row fails alone, by its logits or by a token that does not exist.
        slow_reader: share of clients that read a few times a second, however fast tokens come.
        tiny_pool: the KV cache's size, as a share of what it would be; 0: all of it. One answer in eight is long then.
        clock: share of steps after which the whole process stands still for a second or a minute.
        flush: share of steps after which the cache is told to forget what nobody uses.
    """

    cancel: float = 0.0
    timeout: float = 0.0
    crash: float = 0.0
    bad_row: float = 0.0
    slow_reader: float = 0.0
    tiny_pool: float = 0.0
    clock: float = 0.0
    flush: float = 0.0

    def __str__(self) -> str:
        shown = [f"{_dashed(f.name)}={getattr(self, f.name):g}" for f in fields(self) if getattr(self, f.name)]
        return ",".join(shown) or "none"


USUAL_FAULTS = Faults(
    cancel=0.15, timeout=0.1, crash=0.005, bad_row=0.01, slow_reader=0.1, tiny_pool=0.1, clock=0.001, flush=0.002
)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is: seconds to the first token, and between tokens on average."""

    ttft: float = 1.0
    itl: float = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation, but for the system it runs on.

    Attributes:
        check: when all invariants are proven: after every "step", or after every "event".
        vary: the system's limits and sizes and the kind of workload come from the seed too.
    """

    seed: int = 0
    requests: int = 1000
    workload: Workload = field(default_factory=Workload)
    faults: Faults = field(default_factory=Faults)
    cost: Cost = field(default_factory=Cost)
    slo: Slo = field(default_factory=Slo)
    check: Literal["step", "event"] = "step"
    vary: bool = False


def parse_faults(text: str) -> Faults:
    """ "cancel,crash=0.01", "all" or "none". Raises SettingsError."""
    faults = Faults()
    for word in _words([text]):
        name, equals, value = word.partition("=")
        if name == "all" and not equals:
            faults = USUAL_FAULTS
        elif name != "none" or equals:
            usual = getattr(USUAL_FAULTS, name.replace("-", "_"), None)
            faults = _assign(faults, "--faults", name, value if equals else repr(usual), also=("all", "none"))
    for item in fields(faults):
        if not 0 <= getattr(faults, item.name) <= 1:
            raise SettingsError(f"--faults {_dashed(item.name)}: {getattr(faults, item.name):g} is no share of 1")
    return faults


def parse_cost(words: Iterable[str]) -> Cost:
    """ "gpu", "cpu", or "name=seconds" on top of them. Raises SettingsError."""
    cost = Cost()
    for word in _words(words):
        cost = COSTS[word] if word in COSTS else fill(cost, "--cost", [word], also=tuple(COSTS))
    if cost.step <= 0:
        raise SettingsError("--cost step: it must be above 0, or time would stand still")
    return cost


def fill(options: T, flag: str, words: Iterable[str], also: tuple[str, ...] = ()) -> T:
    """Sets fields from "name=value" words, separated by commas or given one by one. Raises SettingsError."""
    for word in _words(words):
        name, equals, value = word.partition("=")
        if not equals and name not in also:
            raise SettingsError(f"{flag} {word}: must be name=value; names are {', '.join(_names(options, also))}")
        options = _assign(options, flag, name, value, also)
    return options


def _assign(options: T, flag: str, name: str, text: str, also: tuple[str, ...] = ()) -> T:
    name = name.replace("-", "_")
    if name not in {f.name for f in fields(options)}:  # type: ignore[arg-type]
        raise SettingsError(f"{flag}: unknown name {name!r}; names are {', '.join(_names(options, also))}")
    old = getattr(options, name)
    value: Any = text
    if isinstance(old, str):
        if text not in ("poisson", "bursty"):
            raise SettingsError(f"{flag} {name}: {text!r} is not allowed (allowed: poisson, bursty)")
    else:
        try:
            value = type(old)(text)
        except ValueError:
            raise SettingsError(f"{flag} {name}: {text!r} is not a number") from None
        if not 0 <= value < 1e9:
            raise SettingsError(f"{flag} {name}: {text} is not allowed (allowed: 0 or more)")
    return replace(options, **{name: value})  # type: ignore[type-var]


def _names(options: object, also: tuple[str, ...]) -> list[str]:
    return [_dashed(f.name) for f in fields(options)] + list(also)  # type: ignore[arg-type]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _words(texts: Iterable[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]
