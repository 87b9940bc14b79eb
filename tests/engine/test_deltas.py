"""Joining and cutting of deltas: nothing is lost, doubled or put in another order."""

from __future__ import annotations

import pytest

from weft.engine.deltas import ENTRIES_AT_ONCE, first_part, merge, num_entries, split
from weft.ipc.messages import End, ErrorInfo, TextDelta, TextLogprob


def entry(token: str, top: int = 0) -> TextLogprob:
    return TextLogprob(token, token.encode(), -1.0, [(token, token.encode(), -1.0)] * top)


def test_merged_deltas_are_one_for_each_id() -> None:
    deltas = [
        TextDelta(1, "a", [1], logprobs=[entry("a")]),
        TextDelta(2, "x", [7]),
        TextDelta(1, "", []),
        TextDelta(1, "b", [2, 3], logprobs=[entry("b"), entry("c")]),
        TextDelta(2, end=End("completed", "stop")),
        TextDelta(1, "d", [4], end=End("completed", "length")),
    ]
    first, second = merge(deltas)
    assert (first.request_id, first.text, first.token_ids) == (1, "abd", [1, 2, 3, 4])
    assert [item.token for item in first.logprobs or []] == ["a", "b", "c"]
    assert first.end is not None and first.end.finish_reason == "length"
    assert (second.text, second.token_ids, second.logprobs) == ("x", [7], None)
    assert second.end is not None


def test_an_error_stays_behind_its_text() -> None:
    error = TextDelta(1, "lost", end=End("failed", error=ErrorInfo(500, "broke")))
    first, last = merge([TextDelta(1, "a"), TextDelta(1, "b"), error])
    assert (first.text, first.end) == ("ab", None)
    assert last is error


def test_the_prompt_stays_before_its_text() -> None:
    prompt = [TextDelta(1, prompt_text="p"), TextDelta(1, prompt_text="q", prompt_logprobs=[entry("q")])]
    assert merge([*prompt, TextDelta(1, "a"), TextDelta(1, "b")]) == [*prompt, TextDelta(1, "ab")]


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("prompt_tokens", [0, 1, 2, 5000])
@pytest.mark.parametrize("tokens", [0, 1, 5000])
def test_split_says_the_same(top: int, prompt_tokens: int, tokens: int) -> None:
    words = [f"w{i} " for i in range(prompt_tokens)]
    known: list[TextLogprob | None] = [entry(word, top) for word in words[1:]]
    whole = TextDelta(
        1,
        "text",
        token_ids=list(range(tokens)),
        logprobs=[entry(f"t{i}", top) for i in range(tokens)] if tokens else None,
        prompt_text="".join(words) if prompt_tokens else None,
        prompt_logprobs=[None, *known] if prompt_tokens else None,
        end=End("completed", "stop"),
    )
    parts = split(whole)
    assert all(num_entries(part) <= ENTRIES_AT_ONCE for part in parts)
    assert "".join(part.text for part in parts) == "text"
    assert [i for part in parts for i in part.token_ids] == whole.token_ids
    assert [e for part in parts for e in part.logprobs or []] == (whole.logprobs or [])
    assert [e for part in parts for e in part.prompt_logprobs or []] == (whole.prompt_logprobs or [])
    assert "".join(part.prompt_text or "" for part in parts) == "".join(words)
    assert [part.end is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    if len(parts) > 1 and prompt_tokens:
        assert (parts[0].prompt_text, parts[0].prompt_logprobs) == ("w0 ", [None])
        assert all(part.prompt_text is not None for part in parts if part.prompt_logprobs)
    assert merge(parts)[-1].end == whole.end


def test_first_part_leaves_the_rest() -> None:
    deltas = [TextDelta(i, logprobs=[entry("a", 20)] * 50) for i in range(10)] + [TextDelta(99)]
    taken: list[TextDelta] = []
    left = deltas
    while left:
        part, left = first_part(left)
        assert sum(map(num_entries, part[:-1])) < ENTRIES_AT_ONCE
        taken += part
    assert taken == deltas
