"""What a step contains: budgets, chunks, mixing, and the plan's arrays to the last number."""

from __future__ import annotations

import numpy as np
import pytest

from tests.property.walk import VOCAB
from tests.scheduler.rig import add, ids, new_walk, shares, step, steps_until_done, tokens
from weft.core.request import RequestState


def test_arrays_of_a_plan_made_by_hand() -> None:
    """Request 1 decodes while request 2's prompt is computed, of which the first page is cached."""
    walk = new_walk(capacity=32, page_size=4, max_context=16)
    add(walk, [1, 2, 3, 4, 5], new=3)
    first = step(walk)
    assert (first.step, first.mode) == (0, "extend")
    assert first.slots.tolist() == [0, 1, 2, 3, 4]
    assert first.emits.tolist() == [True]
    token = walk.tokens[1][-1]

    add(walk, [1, 2, 3, 4, 6, 7], new=2, seed=9, temperature=1.0)
    plan = step(walk)
    assert (plan.step, plan.mode) == (1, "mixed")
    assert plan.request_ids.tolist() == [2, 1]
    assert plan.extend_lens.tolist() == [2, 1]
    assert plan.seq_lens.tolist() == [6, 6]
    assert plan.token_ids.tolist() == [6, 7, token]
    assert plan.positions.tolist() == [4, 5, 5]
    assert plan.slots.tolist() == [8, 9, 5]  # a page of its own; the second page of request 1 has room
    assert plan.page_table.tolist() == [[0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 4, 5]]
    assert plan.emits.tolist() == [True, True]
    assert [(row.row, row.output_index) for row in plan.sampling] == [(0, 0), (1, 1)]
    assert plan.sampling[0].seed == 9
    assert len(set(plan.table_rows.tolist())) == 2
    for array in (plan.table_rows, plan.extend_lens, plan.seq_lens, plan.token_ids, plan.positions, plan.slots):
        assert array.dtype == np.int32
    walk.drain()


def test_a_plan_does_not_change_with_what_happens_later() -> None:
    walk = new_walk()
    add(walk, tokens(20))
    plan = walk.begin_step()
    assert plan is not None
    before = [plan.token_ids.copy(), plan.slots.copy(), plan.page_table.copy()]
    walk.scheduler.abort(1)
    walk.end_step(plan)
    add(walk, tokens(20, start=2))
    steps_until_done(walk)
    for old, new in zip(before, [plan.token_ids, plan.slots, plan.page_table], strict=True):
        assert np.array_equal(old, new)


def test_prompt_budget_of_a_step() -> None:
    walk = new_walk(max_prefill_tokens=100, chunked_prefill_size=None, policy="fcfs")
    for start in range(1, 5):
        add(walk, tokens(40, start=start))
    assert shares(step(walk)) == {1: 40, 2: 40}
    assert shares(step(walk)) == {3: 40, 4: 40, 1: 1, 2: 1}
    walk.drain()


def test_without_chunks_a_prompt_over_the_budget_runs_alone() -> None:
    walk = new_walk(max_prefill_tokens=50, chunked_prefill_size=None, policy="fcfs")
    add(walk, tokens(20, start=1))
    add(walk, tokens(90, start=2))
    add(walk, tokens(20, start=3))
    assert shares(step(walk)) == {1: 20}
    assert shares(step(walk)) == {2: 90, 1: 1}
    assert shares(step(walk)) == {3: 20, 1: 1, 2: 1}
    walk.drain()


def test_a_long_prompt_is_cut_and_goes_first() -> None:
    walk = new_walk(max_prefill_tokens=32, chunked_prefill_size=32, policy="fcfs")
    long = add(walk, tokens(80, start=1))
    add(walk, tokens(30, start=2))
    for share in (32, 32):
        plan = step(walk)
        assert shares(plan) == {1: share}
        assert not plan.emits.any()
        assert plan.sampling == ()
    plan = step(walk)
    assert shares(plan) == {1: 16, 2: 16}  # what is left goes to the next one, cut in turn
    assert plan.emits.tolist() == [True, False]
    assert long.chunks == 3
    assert shares(step(walk)) == {2: 14, 1: 1}
    walk.drain()


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    walk = new_walk(max_prefill_tokens=64, chunked_prefill_size=32, policy="fcfs")
    add(walk, tokens(300, start=1))
    add(walk, tokens(300, start=2))
    short = add(walk, tokens(20, start=3))
    assert shares(step(walk)) == {1: 32, 3: 20}  # of the two long ones, only one is cut at a time
    assert short.output_len == 1
    walk.drain()


@pytest.mark.parametrize("mixed", [True, False])
def test_decode_rows_ride_along_or_wait(mixed: bool) -> None:
    walk = new_walk(mixed=mixed, chunked_prefill_size=16, max_prefill_tokens=16)
    add(walk, tokens(8, start=1), new=10)
    step(walk)
    add(walk, tokens(40, start=2), new=2)
    plans = [step(walk) for _ in range(3 if mixed else 6)]
    # Unmixed, they take turns: a long prompt must not hold the others up until its end.
    assert [plan.mode for plan in plans] == (["mixed"] * 3 if mixed else ["decode", "extend"] * 3)
    assert [1 in ids(plan) for plan in plans] == ([True] * 3 if mixed else [True, False] * 3)
    plan = step(walk)
    assert (plan.mode, sorted(ids(plan))) == ("decode", [1, 2])
    walk.drain()


def test_places_in_a_batch() -> None:
    walk = new_walk(max_batch_size=2, policy="fcfs")
    for start in range(1, 4):
        add(walk, tokens(5, start=start), new=2)
    assert sorted(ids(step(walk))) == [1, 2]
    assert walk.requests[3].state is RequestState.PENDING
    assert sorted(ids(step(walk))) == [1, 2]  # both end here
    assert ids(step(walk)) == [3]  # and the place is taken in the next step
    walk.drain()


def test_kv_is_reserved_for_what_running_requests_may_still_produce() -> None:
    walk = new_walk(capacity=100, max_context=100)
    add(walk, tokens(10, start=1), new=85)
    add(walk, tokens(10, start=2), new=40)
    assert ids(step(walk)) == [1]  # 10 and a share of 85 are reserved, 10 and a share of 40 do not fit
    steps_until_done(walk)
    assert [walk.requests[k].output_len for k in (1, 2)] == [85, 40]
    walk.drain()


def test_reservation_counts_whole_pages() -> None:
    walk = new_walk(capacity=128, page_size=64, max_context=128)
    for start in (1, 2, 3):
        add(walk, tokens(3, start=start), new=2)
    assert len(ids(step(walk))) == 2  # five tokens take a page each
    walk.drain()


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    walk = new_walk(capacity=100, max_context=100, policy="fcfs")
    add(walk, tokens(10, start=1), new=20)
    step(walk)
    add(walk, tokens(60, start=2), new=30)
    add(walk, tokens(5, start=3), new=2)
    assert ids(step(walk)) == [1]
    walk.drain()
    assert walk.requests[2].first_scheduled_s is not None


def test_penalties_bring_the_tokens_so_far() -> None:
    walk = new_walk()
    add(walk, [5, 6, 7], new=3, presence_penalty=0.5)
    add(walk, [8, 9], new=3)
    step(walk)
    plan = step(walk)
    by_id = {ids(plan)[row.row]: row for row in plan.sampling}
    assert by_id[1].prompt_ids is not None and by_id[1].output_ids is not None
    assert by_id[1].prompt_ids.tolist() == [5, 6, 7]
    assert by_id[1].output_ids.tolist() == walk.tokens[1][3:-1]
    assert by_id[2].prompt_ids is None
    walk.drain()


def test_end_tokens_are_banned_before_min_tokens() -> None:
    walk = new_walk()
    add(walk, [5, 6], new=4, min_tokens=2, ignore_eos=False, stop_token_ids=(9, 3))
    banned = [step(walk).sampling[0].banned for _ in range(2)]
    assert banned == [(0, 3, 9)] * 2
    if walk.scheduler.has_work:
        assert step(walk).sampling[0].banned == ()
    walk.drain()


@pytest.mark.parametrize("chunk", [None, 1, 7, 10, 100])
def test_prompt_logprobs_come_once_per_token_however_it_is_cut(chunk: int | None) -> None:
    walk = new_walk(chunked_prefill_size=chunk, max_prefill_tokens=100)
    prompt = tokens(20)
    for _ in range(2):  # the second time everything is cached, and still computed
        request = add(walk, prompt, prompt_logprobs=0)
        targets: list[int] = []
        while walk.scheduler.has_work:
            plan = walk.begin_step()
            assert plan is not None
            for wanted in plan.prompt_logprobs.values():
                targets += wanted.targets.tolist()
            walk.end_step(plan)
        assert targets == prompt[1:].tolist()
        assert request.reused_tokens == 0
    walk.drain()


def test_prompt_logprobs_of_a_single_token() -> None:
    walk = new_walk()
    add(walk, [5], prompt_logprobs=3)
    assert step(walk).prompt_logprobs == {}
    walk.drain()


def test_out_of_vocabulary_tokens_from_an_engine_end_one_request() -> None:
    walk = new_walk()
    add(walk, tokens(5, start=1))
    add(walk, tokens(5, start=2))
    plan = walk.begin_step()
    assert plan is not None
    result = walk.backend.forward(plan)
    result.tokens[0] = VOCAB
    walk.land(result)
    assert walk.ended == {ids(plan)[0]: RequestState.FAILED}
    walk.drain()
