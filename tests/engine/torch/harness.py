"""Drives a backend by hand-made plans, without the scheduler: a tiny slot allocator and the rows of each step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.backends.torch.backend import TorchBackend
from weft.core.plan import PromptLogprobsRow, SamplingRow, StepPlan, StepResult
from weft.core.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Slots:
    """Hands out pages of `page_size` neighbouring slots in a shuffled order, so that nothing lies in sequence."""

    def __init__(self, num_slots: int, page_size: int, seed: int = 0) -> None:
        self.page_size = page_size
        self.pages = list(range(num_slots // page_size))
        random.Random(seed).shuffle(self.pages)

    def page(self) -> list[int]:
        first = self.pages.pop() * self.page_size
        return list(range(first, first + self.page_size))


@dataclass
class Sequence_:
    """One request: its tokens, where their KV lies, how much of it is computed."""

    request_id: int
    prompt: list[int]
    params: SamplingParams = GREEDY
    seed: int = 0
    output: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    cached: int = 0
    banned: tuple[int, ...] = ()
    results: list[StepResult] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Runs sequences in one batch, prompts in chunks, until each has its tokens."""

    def __init__(self, backend: TorchBackend, num_slots: int = 2048, page_size: int = 1, seed: int = 0) -> None:
        self.backend = backend
        self.slots = Slots(num_slots, page_size, seed)
        self.steps = 0
        backend.allocate_kv(num_slots)

    def step(self, sequences: Sequence[Sequence_], chunk: int) -> StepResult:
        """One step: the next chunk of each prompt, or one token of each decoding sequence."""
        plan = self.plan(sequences, chunk)
        result = self.backend.forward(plan)
        self.steps += 1
        for row, sequence in enumerate(sequences):
            sequence.cached = int(plan.seq_lens[row])
            sequence.results.append(result)
            sequence.rows.append(row)
            if plan.emits[row]:
                sequence.output.append(int(result.tokens[row]))
        return result

    def plan(self, sequences: Sequence[Sequence_], chunk: int) -> StepPlan:
        lengths = [min(chunk, len(s.tokens) - s.cached) for s in sequences]
        ends = [s.cached + length for s, length in zip(sequences, lengths, strict=True)]
        table = np.zeros((len(sequences), max(ends)), np.int32)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampling: list[SamplingRow] = []
        prompt_logprobs: dict[int, PromptLogprobsRow] = {}
        emits = np.array([end == len(s.tokens) for s, end in zip(sequences, ends, strict=True)])
        for row, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            while len(sequence.slots) < end:
                sequence.slots += self.slots.page()
            table[row, :end] = sequence.slots[:end]
            tokens += sequence.tokens[sequence.cached : end]
            positions += range(sequence.cached, end)
            slots += sequence.slots[sequence.cached : end]
            if emits[row]:
                sampling.append(sampling_row(row, sequence))
            asked = sequence.params.prompt_logprobs
            if asked is not None and sequence.cached < len(sequence.prompt):
                targets = sequence.prompt[sequence.cached + 1 : end + 1]
                prompt_logprobs[row] = PromptLogprobsRow(asked, np.array(targets, np.int32))
        return StepPlan(
            step=self.steps,
            mode="decode" if max(lengths) == 1 else "extend",
            request_ids=np.array([s.request_id for s in sequences], np.int64),
            table_rows=np.arange(len(sequences), dtype=np.int32),
            extend_lens=np.array(lengths, np.int32),
            seq_lens=np.array(ends, np.int32),
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            page_table=table,
            emits=emits,
            sampling=tuple(sampling),
            prompt_logprobs=prompt_logprobs,
        )

    def generate(self, sequences: Sequence[Sequence_], count: int, chunk: int = 64) -> list[list[int]]:
        """Runs all to `count` output tokens; those that finish early leave the batch."""
        while running := [s for s in sequences if len(s.output) < count]:
            self.step(running, chunk)
        return [s.output for s in sequences]


def sampling_row(row: int, sequence: Sequence_) -> SamplingRow:
    penalties = sequence.params.has_penalties
    return SamplingRow(
        row=row,
        params=sequence.params,
        seed=sequence.seed,
        output_index=len(sequence.output),
        banned=sequence.banned,
        prompt_ids=np.array(sequence.prompt, np.int32) if penalties else None,
        output_ids=np.array(sequence.output, np.int32) if penalties else None,
    )


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]
