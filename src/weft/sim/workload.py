"""Who comes, when, and with what: conversations drawn from a seed.

All of a conversation is drawn when it begins, from one stream of random numbers, and faults from another. So what is
asked does not depend on how fast answers come, nor on which faults are on, and the loops can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from weft.core.plan import Int32s
from weft.core.sampling import SamplingParams
from weft.sim.model import mix
from weft.sim.options import Cost, Faults, Workload

NEVER = 2**31 - 1

_NOISE = 2**16
_MAX_TURNS = 12


@dataclass(slots=True)
class Turn:
    """One request, as its client wants it.

    Attributes:
        request_id: fixed in advance, so that draws by id do not depend on the order of arrival.
        words: start and length of its new words in the noise.
        params: as sent.
        stop_at: output length at which a stop string is found; NEVER: there is none.
        priority, think_s: its priority; how long the client thinks before it.
        deadline_after_s: from arrival; None: none.
        cancel_after_s: the client is gone so long after it came; None: it stays.
        cancel_at: the client is gone once it has read so many tokens.
        cancel_late: it cancels what has just ended.
        read_interval_s: between two looks of a slow reader; 0: reads at once.
        adapter: which of the model's adapters it asks for; 0: none.
    """

    request_id: int
    words: tuple[int, int]
    params: SamplingParams
    stop_at: int
    priority: int
    think_s: float
    deadline_after_s: float | None
    cancel_after_s: float | None
    cancel_at: int
    cancel_late: bool
    read_interval_s: float
    adapter: int = 0


@dataclass(slots=True)
class Conversation:
    """Turns that build on each other.

    Attributes:
        start_s: when its first turn comes.
        beginning: int32 [n], the text that it shares with its family.
        session_id, session_ttl_s: of all its turns, or None.
        ends_session: whether it closes its session after the last turn.
    """

    start_s: float
    beginning: Int32s
    turns: list[Turn]
    session_id: str | None
    session_ttl_s: float | None
    ends_session: bool


class Author:
    """Draws `requests` turns; see the module's docstring.

    Args:
        vocab, first_word: prompts are made of tokens from `first_word` on, so that they hold no end tokens.
        max_len: longest prompt plus output.
        batch: rows that the system runs at once, for the rate that `Workload.load` means.
        adapters: how many the model has; most conversations stay with one of them, or with none.
    """

    def __init__(
        self,
        workload: Workload,
        faults: Faults,
        cost: Cost,
        *,
        seed: int,
        requests: int,
        vocab: int,
        first_word: int,
        max_len: int,
        batch: int,
        adapters: int = 0,
    ) -> None:
        self.workload = workload
        self._faults = faults
        self._max_len = max_len
        self._requests = requests
        self._rng = Random(f"workload {seed}")
        self._fault_rng = Random(f"faults {seed}")
        self._adapters = adapters
        self._adapter_rng = Random(f"adapters {seed}")
        # Numpy's generators may change between versions; this does not.
        noise = mix(np.arange(_NOISE, dtype=np.uint64) + np.uint64((seed * _NOISE) % 2**63))
        self.noise: Int32s = (noise % np.uint64(max(1, vocab - first_word)) + np.uint64(first_word)).astype(np.int32)
        self._noise = np.concatenate([self.noise, self.noise])
        self._families = [self.words(*self._family()) for _ in range(workload.families)]
        self.rate = workload.rate or workload.load * capacity(workload, cost, batch)

    def words(self, start: int, length: int) -> Int32s:
        """int32 [length], a stretch of noise."""
        if length <= _NOISE:
            return self._noise[start : start + length]
        return np.resize(self._noise[start : start + _NOISE], length)

    def conversations(self) -> Iterator[Conversation]:
        """In the order in which they start."""
        rng, workload = self._rng, self.workload
        conversation_rate = self.rate / max(1.0, workload.turns)
        bursty = workload.arrivals == "bursty"
        drawn, now, left_in_burst = 0, 0.0, 0
        while drawn < self._requests:
            if not bursty:
                now += rng.expovariate(conversation_rate)
            elif left_in_burst:
                left_in_burst -= 1
                now += rng.expovariate(max(1, workload.burst) / max(1e-3, workload.burst_s))
            else:
                left_in_burst = max(1, workload.burst) - 1
                now += rng.expovariate(conversation_rate / max(1, workload.burst))
            conversation = self._conversation(now, drawn, self._requests - drawn)
            drawn += len(conversation.turns)
            yield conversation

    def _family(self) -> tuple[int, int]:
        length = int(self.workload.family_tokens * self._rng.uniform(0.5, 1.5))
        return self._rng.randrange(_NOISE), min(length, self._max_len // 2)

    def _conversation(self, start_s: float, drawn: int, left: int) -> Conversation:
        rng, workload = self._rng, self.workload
        count = 1
        while count < _MAX_TURNS and rng.random() >= 1 / max(1.0, workload.turns):
            count += 1
        if not self._families or rng.random() < workload.alone:
            beginning = self.words(*self._family())
        else:
            beginning = self._families[int(len(self._families) * rng.random() ** 2)]  # some are asked for more often
        session = rng.random() < workload.sessions
        ttl, ends = rng.choice([None, 5.0, 60.0]), rng.random() < 0.25
        turns = [self._turn(drawn + i + 1) for i in range(min(count, left))]
        self._draw_adapters(turns)
        return Conversation(
            start_s=start_s,
            beginning=beginning,
            turns=turns,
            session_id=f"session {drawn + 1}" if session else None,
            session_ttl_s=ttl if session else None,
            ends_session=session and ends,
        )

    def _draw_adapters(self, turns: list[Turn]) -> None:
        """One for the conversation; now and then a turn goes to another, which then reads the same history."""
        rng = self._adapter_rng
        usual = rng.randint(0, self._adapters)
        for turn in turns:
            turn.adapter = usual if rng.random() < 0.8 else rng.randint(0, self._adapters)

    def _turn(self, request_id: int) -> Turn:
        rng, workload = self._rng, self.workload
        new = 1 + int(rng.expovariate(1 / max(1, workload.new_tokens)))
        length = max(1, int(workload.output_tokens * rng.lognormvariate(0.0, workload.output_spread)))
        if self._faults.tiny_pool and rng.random() < 0.125:
            length *= 16
        length = min(length, self._max_len)
        max_new: int | None = length
        stop_at = NEVER
        kind, ignore_eos = rng.random(), rng.random() < 0.8
        if kind < workload.open_ended:
            max_new = None
            ignore_eos = kind < workload.open_ended / 2
            stop_at = length if ignore_eos else NEVER
        elif kind > 0.9:
            stop_at, max_new = length, 2 * length
        greedy, seeded = rng.random() < workload.greedy, rng.random() < 0.3
        params = SamplingParams(
            max_new_tokens=max_new,
            min_tokens=min(3, max_new or 3) if rng.random() < 0.05 else 0,
            temperature=0.0 if greedy else 1.0,
            seed=rng.randrange(2**63) if seeded else None,
            ignore_eos=ignore_eos,
        )
        turn = Turn(
            request_id=request_id,
            words=(rng.randrange(_NOISE), new),
            params=params,
            stop_at=stop_at,
            priority=rng.randrange(max(1, workload.priorities)),
            think_s=rng.expovariate(1 / max(1e-3, workload.think_s)),
            deadline_after_s=None,
            cancel_after_s=None,
            cancel_at=NEVER,
            cancel_late=False,
            read_interval_s=0.0,
        )
        self._spoil(turn, length)
        return turn

    def _spoil(self, turn: Turn, length: int) -> None:
        """The client's faults. Every number is drawn whether it is wanted or not."""
        rng, faults = self._fault_rng, self._faults
        cancels, how, when, scale = rng.random(), rng.random(), rng.expovariate(1.0), rng.random()
        if cancels < faults.cancel:
            if how < 0.1:
                turn.cancel_after_s = 0.0
            elif how < 0.5:
                turn.cancel_after_s = when * 10.0 ** (-2 - 2 * scale) if how < 0.3 else when * 0.5
            elif how < 0.9:
                turn.cancel_at = 1 + int(scale * length)
            else:
                turn.cancel_late = True
        times_out, slack, tight = rng.random(), rng.expovariate(1.0), rng.random()
        if times_out < faults.timeout:
            turn.deadline_after_s = slack * 10.0 ** (-2.5 * tight)
        slow, pace = rng.random(), rng.random()
        if slow < faults.slow_reader:
            turn.read_interval_s = 10.0 ** (-1 + 1.5 * pace)


def capacity(workload: Workload, cost: Cost, batch: int) -> float:
    """Requests per second that a full batch of such requests would serve, roughly: half of each prompt is cached."""
    output = workload.output_tokens * float(np.exp(workload.output_spread**2 / 2))
    prompt = workload.family_tokens + workload.turns * (workload.new_tokens + output / 2)
    row_s = cost.decode_row + (prompt + output / 2) * cost.context_token
    seconds = output * ((cost.step + cost.host) / batch + row_s) + prompt / 2 * cost.prompt_token
    return 1 / seconds
