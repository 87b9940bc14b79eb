"""Prompts are computed once: between turns, between neighbours, and inside one batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.rig import add, ids, new_walk, shares, step, steps_until_done, tokens

PAGES = pytest.mark.parametrize("page", [1, 16, 64])


@PAGES
def test_sixteen_requests_with_one_system_prompt_compute_it_once(page: int) -> None:
    walk = new_walk(capacity=16384, page_size=page)
    system, new = tokens(512), 3
    for k in range(16):
        add(walk, np.concatenate([system, tokens(4, start=20 + k)]), new=new)
    computed = sum(plan.num_tokens for plan in steps_until_done(walk))
    assert computed == 512 + 16 * 4 + 16 * (new - 1)
    assert [walk.requests[k].reused_tokens for k in range(1, 17)] == [0] + [512] * 15
    walk.drain()


def test_those_who_wait_for_a_shared_prompt_wait_one_step() -> None:
    walk = new_walk()
    system = tokens(100)
    for k in range(4):
        add(walk, np.concatenate([system, tokens(4, start=20 + k)]))
    add(walk, tokens(50, start=2))
    assert shares(step(walk)) == {1: 104, 5: 50}  # strangers do not wait
    assert shares(step(walk)) == {2: 4, 3: 4, 4: 4, 1: 1, 5: 1}
    walk.drain()


def test_who_waits_for_a_long_shared_prompt_gets_all_its_chunks() -> None:
    walk = new_walk(chunked_prefill_size=32, max_prefill_tokens=64)
    system = tokens(128)
    for k in range(3):
        add(walk, np.concatenate([system, tokens(4, start=20 + k)]))
    plans = steps_until_done(walk)
    assert sum(plan.num_tokens for plan in plans) == 128 + 3 * 4 + 3 * 3
    walk.drain()


def test_short_common_beginnings_are_not_waited_for() -> None:
    walk = new_walk()
    for k in range(3):
        add(walk, [7] * 8 + tokens(30, start=20 + k).tolist())
    assert len(ids(step(walk))) == 3
    walk.drain()


def test_who_computes_its_whole_prompt_anyway_does_not_wait() -> None:
    walk = new_walk()
    for _ in range(3):
        add(walk, tokens(40), prompt_logprobs=1)
    assert shares(step(walk)) == {1: 40, 2: 40, 3: 40}
    walk.drain()


@PAGES
def test_the_second_turn_computes_only_what_is_new(page: int) -> None:
    walk = new_walk(page_size=page)
    first = add(walk, tokens(100), new=29)
    steps_until_done(walk)
    stored = 100 + 28  # the last token's KV was never computed
    history = np.array(walk.tokens[1], dtype=np.int32)
    second = add(walk, np.concatenate([history, tokens(10, start=2)]), new=1)
    plan = step(walk)
    reused = stored - stored % page
    assert second.reused_tokens == reused
    assert plan.num_tokens == first.device_len + 10 - reused
    walk.drain()


@PAGES
def test_retain_none_shares_between_the_living_only(page: int) -> None:
    walk = new_walk(page_size=page, retain="none")
    prompt = tokens(130)
    add(walk, prompt, new=3)
    again = add(walk, prompt, new=5)
    steps_until_done(walk)
    assert again.reused_tokens == 129 - 129 % page
    later = add(walk, prompt)
    steps_until_done(walk)
    assert later.reused_tokens == 0
    walk.drain()


def test_what_a_cancelled_request_computed_is_kept() -> None:
    walk = new_walk(chunked_prefill_size=64, max_prefill_tokens=64)
    add(walk, tokens(200), new=5)
    step(walk)
    step(walk)
    walk.scheduler.abort(1)
    walk.settle()
    second = add(walk, tokens(200), new=1)
    step(walk)
    assert second.reused_tokens == 128
    walk.drain()


def test_what_a_failed_step_computed_is_not() -> None:
    walk = new_walk()
    add(walk, tokens(50))
    step(walk, broken=True)
    second = add(walk, tokens(50))
    steps_until_done(walk)
    assert second.reused_tokens == 0
    walk.drain()


def test_a_full_cache_forgets_the_oldest_prompt() -> None:
    walk = new_walk(capacity=256, max_context=256)
    for start in (1, 2):
        add(walk, tokens(100, start=start), new=1)
        steps_until_done(walk)
    add(walk, tokens(100, start=1), new=1)  # the first is used again
    steps_until_done(walk)
    add(walk, tokens(100, start=3), new=1)
    steps_until_done(walk)
    assert walk.cache.peek(tokens(100, start=1)) == 99
    assert walk.cache.peek(tokens(100, start=2)) == 0
    walk.drain()
