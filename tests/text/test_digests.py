"""Digests tell exactly how much two prompts have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.text.digests import BLOCK_CHARS, BLOCK_IDS, chat_digests, ids_digests, text_digests

ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=1200)}), min_size=1, max_size=5)


def common(a: list[tuple[str, int]], b: list[tuple[str, int]]) -> int:
    known = {digest for digest, _ in a}
    return max((length for digest, length in b if digest in known), default=0)


@given(MESSAGES, MESSAGES, MESSAGES)
def test_a_common_beginning_is_known_as_far_as_it_goes(begin: Any, one: Any, other: Any) -> None:
    a, b = chat_digests(begin + one), chat_digests(begin + other)
    whole = sum(len(message["content"]) for message in begin)
    assert common(a, b) >= whole
    if one[0]["role"] != other[0]["role"]:
        assert common(a, b) == whole


def test_lengths_and_places() -> None:
    text = "x" * (2 * BLOCK_CHARS + 5)
    assert [length for _, length in text_digests(text)] == [BLOCK_CHARS, 2 * BLOCK_CHARS, 2 * BLOCK_CHARS + 5]
    messages = [{"role": "user", "content": text}, {"role": "user", "content": "y"}]
    lengths = [length for _, length in chat_digests(messages)]
    assert lengths == [BLOCK_CHARS, 2 * BLOCK_CHARS, 2 * BLOCK_CHARS + 5, 2 * BLOCK_CHARS + 6]
    assert [length for _, length in ids_digests(range(BLOCK_IDS + 1))] == [BLOCK_IDS, BLOCK_IDS + 1]


def test_a_long_message_that_goes_on_differently() -> None:
    """Within a message, what is shared is found block by block."""
    shared = "s" * (3 * BLOCK_CHARS)
    a, b = ([{"role": "user", "content": shared + end}] for end in ("one", "other"))
    assert common(chat_digests(a), chat_digests(b)) == 3 * BLOCK_CHARS


@pytest.mark.parametrize(
    "other",
    [
        lambda: chat_digests([{"role": "assistant", "content": "a"}]),
        lambda: chat_digests([{"role": "user", "content": "b"}]),
        lambda: chat_digests([{"role": "user", "content": "a", "name": "n"}]),
        lambda: chat_digests([{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
        lambda: chat_digests([{"role": "user", "content": "a"}], "adapter"),
        lambda: text_digests("a"),
        lambda: ids_digests([97]),
        lambda: chat_digests([{"role": "user", "content": None}]),
    ],
)
def test_what_differs_has_nothing_in_common(other: Callable[[], Any]) -> None:
    assert common(chat_digests([{"role": "user", "content": "a"}]), other()) == 0


def test_nulls_and_the_order_of_fields_do_not_count() -> None:
    a = chat_digests([{"role": "user", "content": "a", "name": None}])
    assert a == chat_digests([{"content": "a", "role": "user"}])
