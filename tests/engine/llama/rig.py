"""The bundled model as GGUF under the real scheduler and cache, and the same alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions
from weft.backends.registry import BUNDLED_MODEL
from weft.core.clock import VirtualClock
from weft.core.plan import PIECE_TOKENS, StepPlan
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache
from weft.scheduler.limits import Limits
from weft.scheduler.scheduler import Scheduler
from weft.text.tokenizer import Tokenizer

GGUF = BUNDLED_MODEL / "model-q8_0.gguf"
CACHE_FACTS = ("retain", "eviction_threshold", "host_tokens", "resident_tokens")
LIMITS = Limits(
    max_prefill_tokens=500,
    chunked_prefill_size=500,
    max_batch_size=8,
    max_concurrent_requests=64,
    request_timeout_s=None,
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


def chat(*turns: str) -> list[int]:
    """Token ids of a chat whose turns are the user's and the assistant's, in turn."""
    roles = ("user", "assistant")
    return tokenizer().encode_chat([{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)])


class Rig:
    """`capacity` cells, `sequences` ids; every step is followed by a proof of all invariants."""

    def __init__(
        self,
        capacity: int = 4096,
        sequences: int = 16,
        options: LlamaCppOptions | None = None,
        model: Path = GGUF,
        lora: Mapping[str, Path] | None = None,
        **more: Any,
    ) -> None:
        cache_facts = {name: more.pop(name) for name in CACHE_FACTS if name in more}
        options = options or LlamaCppOptions()
        options = replace(options, num_sequences=sequences, host_pieces="host_tokens" in cache_facts)
        self.backend = LlamaCppBackend(model, options, lora)
        self.geometry = geometry = self.backend.load()
        self.backend.allocate_kv(capacity)
        self.limits = replace(LIMITS, **{"max_batch_size": min(8, sequences)} | more)
        self.cache = PrefixCache(
            capacity,
            max_rows=self.limits.max_batch_size,
            max_len=min(capacity, geometry.max_context_tokens),
            num_sequences=sequences,
            shares=geometry.shares_prefixes,
            piece_tokens=geometry.piece_tokens or PIECE_TOKENS,
            **cache_facts,
        )
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            self.limits,
            self.cache,
            self.clock,
            max_context_tokens=geometry.max_context_tokens,
            vocab_size=geometry.vocab_size,
            eos_token_ids=geometry.eos_token_ids,
            adapters=len(lora or ()),
        )
        self.next_id = 1

    def add(self, prompt: list[int], *, new: int = 24, adapter: int = 0, **params: Any) -> Request:
        params = {"max_new_tokens": new, "temperature": 0.0} | params
        ids = np.array(prompt, np.int32)
        request = self.scheduler.add(self.next_id, ids, SamplingParams(**params), adapter=adapter)
        self.next_id += 1
        return request

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.apply(plan, self.backend.forward(plan))
            self.check()
        return plan

    def run(self) -> None:
        """Until nothing is left."""
        steps = 0
        while self.scheduler.has_work:
            assert self.step() is not None
            steps += 1
            assert steps < 20_000

    def say(self, prompt: list[int], **more: Any) -> list[int]:
        """The output of one request, run to its end."""
        request = self.add(prompt, **more)
        self.run()
        return output(request)

    def check(self) -> None:
        self.scheduler.check()
        self.scheduler.take_updates()
        self.backend.rearrange(self.cache.take_ops())
        library, memory = self.backend._library, self.backend._memory
        for sequence, length in enumerate(self.backend._lengths):
            assert library.llama_memory_seq_pos_max(memory, sequence) == length - 1

    def close(self) -> None:
        self.cache.flush()
        self.check()
        assert self.cache.sequences is not None and self.cache.sequences.pool.free == self.cache.sequences.pool.total
        assert not any(self.backend._lengths)
        self.backend.close()


def output(request: Request) -> list[int]:
    ids: list[int] = request.output_ids.tolist()
    return ids


@cache
def _alone_backend(model: Path) -> LlamaCppBackend:
    backend = LlamaCppBackend(model, LlamaCppOptions(num_sequences=1))
    backend.load()
    return backend


def alone(prompt: list[int], new: int = 24, *, model: Path = GGUF) -> list[int]:
    """What llama.cpp itself answers, greedy, in a fresh context, the prompt in one piece."""
    backend = _alone_backend(model)
    backend.allocate_kv(2048)
    library, context = backend._library, backend._context
    ends = {0, 2}
    tokens, answer = list(prompt), []
    start = 0
    while len(answer) < new:
        piece = np.array(tokens[start:], np.int32)
        last = np.arange(len(piece)) == len(piece) - 1
        positions = np.arange(start, len(tokens), dtype=np.int32)
        batch = backend._batch.fill(piece, positions, np.zeros(len(piece), np.int32), last)
        assert library.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(library.llama_get_logits(context), shape=(1, 4096))
        answer.append(int(logits[0].argmax()))
        start = len(tokens)
        tokens.append(answer[-1])
        if answer[-1] in ends:
            break
    return answer
