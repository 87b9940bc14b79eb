"""Streamed text, joined, equals unstreamed text: for every tokenizer, every text and every way of cutting it."""

from __future__ import annotations

import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from weft.text import StopMatcher, TextStream, Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from text_builders import BUILDERS, first_stop  # noqa: E402

DEMO = Path(weft.__file__).parent / "assets" / "demo"
KINDS = [*BUILDERS, "demo"]
FRAGMENTS = [
    "你好",
    "世界。",
    "天气",
    "👨‍👩‍👧‍👦",
    "🇨🇳",
    "😀",
    "é",
    "e\u0301",
    "ู",
    "한국어",
    " ",
    "  ",
    "\n",
    "hello",
    " world",
    "the ",
    ".",
]
FRAGMENTS += ["<think>", "two words", "<|im_end|>", "</s>", "Ünï", "�", "▁", "𠮷", "Don't", "\u200d"]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=10).map("".join)

check = settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def loaded(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours and the bare library's, of the same folder."""
    if kind == "demo":
        return Tokenizer.load(DEMO), tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        BUILDERS[kind](Path(folder))
        return Tokenizer.load(Path(folder)), tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


def ids_of(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Ids of a real text, or any ids at all: broken characters, special tokens and ids that do not exist."""
    if data.draw(st.booleans()):
        return tokenizer.encode(data.draw(TEXTS))
    # The first 260 ids hold the special tokens and, in the byte-fallback tokenizer, all byte tokens.
    any_id = st.one_of(st.integers(0, 260), st.integers(0, tokenizer.vocab_size + 5))
    return data.draw(st.lists(any_id, max_size=30))


def cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    marks = data.draw(st.lists(st.integers(0, len(ids)), max_size=8).map(sorted))
    edges = [0, *marks, len(ids)]
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def library_gives_up(kind: str, backend: tokenizers.Tokenizer, ids: list[int], skip: bool) -> bool:
    """Where decoding differs from the library's on purpose (see `weft.text.token_table`)."""
    if kind == "byte_level":
        return backend.token_to_id("Ünï") in ids
    if kind != "llama":
        return False
    tokens = [backend.id_to_token(i) for i in ids]
    special = {"<unk>", "<s>", "</s>"} if skip else set()
    text = "".join(t if re.fullmatch("<0x..>", t) else "|" for t in tokens if t is not None and t not in special)
    for run in text.split("|"):
        data = bytes.fromhex(run.replace("<0x", "").replace(">", ""))
        broken = data.decode("utf-8", "replace").count("�") - data.count("�".encode())
        if broken and data.decode("utf-8", "ignore"):
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
@check
@given(data=st.data())
def test_joined_pieces_are_the_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer, backend = loaded(kind)
    ids = ids_of(data, tokenizer)
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [stream.push(part) for part in cut(data, ids)]
    pieces += [stream.flush(), stream.flush()]
    assert "".join(pieces) == whole
    assert pieces[-1] == ""
    if not library_gives_up(kind, backend, ids, skip):
        assert whole == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "demo"])
@check
@given(text=TEXTS)
def test_no_piece_of_a_real_text_holds_half_a_character(kind: str, text: str) -> None:
    tokenizer, backend = loaded(kind)
    ids = tokenizer.encode(text)
    stream = tokenizer.detokenizer(skip_special_tokens=False)
    pieces = [stream.push([i]) for i in ids]
    assert stream.flush() == ""
    if not library_gives_up(kind, backend, ids, skip=False):
        assert "".join(pieces) == backend.decode(ids, skip_special_tokens=False)
    if "�" not in text and "\x00" not in text:
        assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@check
@given(data=st.data())
def test_a_stream_continues_its_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer, _ = loaded(kind)
    ids = ids_of(data, tokenizer)
    split = data.draw(st.integers(0, len(ids)))
    skip = data.draw(st.booleans())
    before = tokenizer.detokenizer(skip_special_tokens=skip)
    prompt_text = before.push(ids[:split])
    stream = tokenizer.detokenizer(prompt_ids=ids[:split], skip_special_tokens=skip)
    joined = "".join(stream.push(part) for part in cut(data, ids[split:])) + stream.flush()
    assert prompt_text + joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@check
@given(data=st.data())
def test_streamed_text_ends_at_the_first_stop_string(kind: str, data: st.DataObject) -> None:
    tokenizer, _ = loaded(kind)
    ids = ids_of(data, tokenizer)
    whole = tokenizer.decode(ids)
    stops = data.draw(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(min_size=1, max_size=3)), max_size=2))
    for _ in range(data.draw(st.integers(0, 2)) if whole else 0):
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 6))])
    include = data.draw(st.booleans())
    stream = TextStream(tokenizer, stops=stops, include_stop=include)
    sent, used, token_texts = "", 0, []
    for part in cut(data, ids):
        piece = stream.push(part)
        sent += piece.text
        used += piece.tokens_used
        token_texts += piece.token_texts
        assert piece.tokens_used == len(piece.token_texts)
        assert whole.startswith(sent)
        if piece.matched_stop is not None:
            break
    early = stream.matched_stop is not None
    sent += stream.finish()
    found = first_stop(whole, stops)
    expected = whole if found is None else whole[: found[0] + (len(found[1]) if include else 0)]
    assert sent == expected
    assert stream.matched_stop == (found[1] if found else None)
    if found is not None:
        assert stream.push(ids).text == "" and stream.finish() == ""
    if early and found:
        # The last token used is the one that completed the stop string.
        end = found[0] + len(found[1])
        assert len("".join(token_texts[:-1])) < end <= len("".join(token_texts))
    else:
        assert used == len(ids)


@settings(check, max_examples=1500)
@given(
    text=st.text("ab你😀", max_size=24),
    stops=st.lists(st.text("ab你😀", min_size=1, max_size=5), max_size=4),
    marks=st.lists(st.integers(0, 24), max_size=6).map(sorted),
    include=st.booleans(),
)
def test_stop_matcher_equals_its_definition(text: str, stops: list[str], marks: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    found = first_stop(text, stops)
    end = len(text) if found is None else found[0] + len(found[1])
    sent = ""
    for a, b in zip([0, *marks], [*marks, len(text)], strict=True):
        update = matcher.push(text[a:b])
        sent += update.text
        read = text[: max(a, b)]
        if len(read) >= end and found:
            assert update.matched == found[1]
            continue
        assert update.matched is None
        # Held back is exactly the longest end of the text that could still become a stop string.
        could_be = [
            n for n in range(len(read) + 1) if any(len(s) > n and s.startswith(read[len(read) - n :]) for s in stops)
        ]
        assert len(read) - len(sent) == max(could_be, default=0)
    sent += matcher.flush()
    assert sent == (text if found is None else text[: end if include else found[0]])
