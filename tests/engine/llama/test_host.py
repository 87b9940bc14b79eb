"""KV that goes to host memory and comes back, in llama.cpp's own cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from tests.engine.llama.rig import Rig, alone, chat, output
from weft.backends.llama_cpp.backend import KvType, LlamaCppOptions
from weft.core.errors import SettingsError
from weft.core.request import RequestState

STORY = "My name is Alice and I live in Oslo. " * 30
QUESTION = chat(STORY + "What is my name?")
F16_TOLERANCE = 1e-2
"""Largest difference of a logit (they range over some 30) after a prompt's KV went out and came back as float16."""


def demote_all(rig: Rig) -> None:
    rig.cache.evict(rig.cache.tree.evictable_tokens)
    rig.check()
    assert rig.cache.counts().cached == 0


def host_rig(**more: Any) -> Rig:
    return Rig(**({"host_tokens": 4096, "resident_tokens": 4096} | more))


def test_a_prefix_that_went_out_and_came_back_says_what_it_said() -> None:
    rig = host_rig()
    cold = rig.say(QUESTION)
    assert cold == alone(QUESTION)
    demote_all(rig)
    assert rig.backend._pieces.bytes > len(QUESTION) * 500
    again = rig.add(QUESTION, new=24)
    rig.run()
    assert again.reused_tokens == len(QUESTION) - 1
    assert output(again) == cold
    rig.close()
    assert not rig.backend._pieces.bytes


def test_a_branch_in_the_middle_of_a_piece() -> None:
    rig = host_rig()
    rig.say(QUESTION)
    demote_all(rig)
    other = chat(STORY + "Where do I live?")
    assert rig.say(other) == alone(other)
    assert rig.say(QUESTION) == alone(QUESTION)
    assert rig.cache.host is not None and rig.cache.host.restored_total == len(QUESTION) - 1
    rig.close()


def test_the_cells_of_a_part_fit_beside_a_full_cache() -> None:
    """The spare cells take the whole piece while a prompt takes a part of it."""
    rig = host_rig(capacity=len(QUESTION) + 40, sequences=4)
    rig.say(QUESTION, new=4)
    demote_all(rig)
    length = len(QUESTION) // 2
    filler = rig.add(chat("Say something long. " * 20), new=60)
    rig.step()
    part = rig.add(QUESTION[:length], new=4)
    rig.run()
    assert part.reused_tokens == length - 1 and filler.output_len
    assert output(part) == alone(QUESTION[:length], new=4)
    rig.close()


def test_retracted_requests_go_on_from_host_memory() -> None:
    """Rows one at a time would be exact; here two that push each other out say what they say in company."""
    prompts = [chat("Count: 1 2 3 4 5 6 7 8"), chat("Count: 2 4 6 8 10 12")]
    roomy = Rig(max_batch_size=2)
    calm = [roomy.add(prompt, new=80, ignore_eos=True) for prompt in prompts]
    roomy.run()
    rig = host_rig(capacity=len(prompts[0]) + 110, sequences=4, max_batch_size=2)
    rig.scheduler._ratio.value = 0.0
    requests = [rig.add(prompt, new=80, ignore_eos=True) for prompt in prompts]
    rig.run()
    assert rig.scheduler.meters.retractions > 0 and rig.cache.host is not None
    assert rig.cache.host.restored_total > 0
    assert [output(r) for r in requests] == [output(r) for r in calm]
    rig.close()
    roomy.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_what_comes_back_is_what_went_out(kv_type: KvType) -> None:
    """The same cells, so the same logits: to the bit when quantised, within a tolerance as float16."""
    rig = host_rig(options=LlamaCppOptions(kv_type=kv_type))
    seen = []
    for _ in range(2):
        rig.add(QUESTION, new=1)
        rig.run()  # computed; now its last token alone, as after a restore
        for demoted in (False, True):
            if demoted:
                demote_all(rig)
            rig.add(QUESTION, new=1)
            rig.step()
            library, context = rig.backend._library, rig.backend._context
            logits = np.ctypeslib.as_array(library.llama_get_logits(context), shape=(rig.geometry.vocab_size,)).copy()
            seen.append(logits)
            rig.run()
    difference = max(float(np.abs(seen[0] - logits).max()) for logits in seen[1:])
    assert difference == 0.0 if kv_type != "f16" else difference < F16_TOLERANCE
    rig.close()


def test_the_second_tier_needs_an_id_of_its_own() -> None:
    with pytest.raises(SettingsError, match="n_seq_max: 256: must be 1 to 255 with kv_cache.host_memory_mb"):
        host_rig(sequences=256)


def test_what_cannot_be_brought_back_fails_one_request_once() -> None:
    """As when there was no memory to save it."""
    rig = host_rig()
    cold = rig.say(QUESTION)
    demote_all(rig)
    rig.backend._pieces._pieces.clear()
    other = rig.add(list(range(300, 340)), new=8)
    lost = rig.add(QUESTION, new=24)
    rig.run()
    assert lost.state is RequestState.FAILED and other.state is RequestState.COMPLETED
    assert rig.say(QUESTION) == cold
    rig.close()
