"""Scheduler, radix cache and torch backend together give `transformers`' greedy tokens: whatever is cached, however
prompts are cut, whatever the page size, alone and in company."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.torch.harness import random_prompts
from tests.engine.torch.test_native import check_greedy
from tests.engine.torch.zoo import VOCAB, Zoo
from weft.backends.torch.backend import TorchBackend
from weft.config.resolve import resolve
from weft.core.sampling import SamplingParams
from weft.engine.core import EngineCore
from weft.ipc.messages import Submit

COUNT = 10
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen3-moe", "rope-llama3", "gpt2", "gpt-neox", "gemma2")


def run(core: EngineCore, prompts: dict[int, list[int]]) -> dict[int, tuple[list[int], int]]:
    """request id -> (generated tokens, prompt tokens reused); all invariants are checked after every step."""
    params = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True)
    for request_id, prompt in prompts.items():
        core.submit(Submit(request_id, np.array(prompt, np.int32).tobytes(), params))
    tokens: dict[int, list[int]] = {request_id: [] for request_id in prompts}
    reused: dict[int, int] = {}
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.tokens
            if output.end is not None:
                assert output.end.state == "completed", output.end.error
                reused[output.request_id] = output.end.cached_tokens
        core.scheduler.check()
    return {request_id: (tokens[request_id], reused[request_id]) for request_id in prompts}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_engine_equals_the_library(zoo: Zoo, name: str, chunk: int, page_size: int) -> None:
    settings = resolve(
        sets=[
            f"scheduler.chunked_prefill_size={chunk}",
            "scheduler.max_prefill_tokens=70",
            f"kv_cache.page_size={page_size}",
            "kv_cache.max_items=512",
            "http.max_concurrent_requests=4",
        ]
    ).settings
    core = EngineCore(settings, TorchBackend(zoo.path(name)))
    core.load()
    shared, *tails = random_prompts((40, 3, 9, 17, 1), VOCAB, seed=11)
    alone = {1: shared + tails[0]}
    company = {2: shared + tails[1], 3: shared + tails[2], 4: shared + tails[0], 5: tails[3], 6: shared + tails[3]}
    outputs = run(core, alone) | run(core, company)
    # A second turn: what was generated is in the cache too.
    turn = alone[1] + outputs[1][0] + tails[1]
    outputs |= run(core, {7: turn})

    prompts = alone | company | {7: turn}
    for request_id, prompt in prompts.items():
        check_greedy(zoo.model(name), prompt, outputs[request_id][0])
    whole_pages = lambda length: length - length % page_size  # noqa: E731
    assert outputs[1][1] == 0
    for request_id in (2, 3, 6):
        assert outputs[request_id][1] >= whole_pages(40)
    assert outputs[4][1] == whole_pages(len(alone[1]) - 1)
    assert outputs[7][1] == whole_pages(len(alone[1]) + COUNT - 1)
