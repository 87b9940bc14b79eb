from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from weft.core.errors import InvalidRequestError
from weft.text import StopMatcher, StopUpdate, TextStream
from weft.text import Tokenizer as Ours
from weft.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from weft.text.token_table import build_table

Kinds = dict[str, Ours]


def byte_ids(tokenizer: Ours, data: bytes) -> list[int]:
    """Ids of single-byte tokens of the byte-fallback tokenizer."""
    first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x00")
    return [first + byte for byte in data]


def test_strategies(tokenizers_by_kind: Kinds) -> None:
    exact = {kind for kind, t in tokenizers_by_kind.items() if isinstance(t.detokenizer(), ByteDetokenizer)}
    assert exact == {"byte_level", "llama", "unigram"}


def test_a_character_waits_for_its_last_byte(tokenizers_by_kind: Kinds) -> None:
    llama = tokenizers_by_kind["llama"]
    stream = llama.detokenizer()
    assert [stream.push([i]) for i in byte_ids(llama, "你😀".encode())] == ["", "", "你", "", "", "", "😀"]
    assert stream.flush() == ""


def test_incomplete_bytes_come_out_as_a_whole_decode_shows_them(tokenizers_by_kind: Kinds) -> None:
    llama = tokenizers_by_kind["llama"]
    stream = llama.detokenizer()
    ids = byte_ids(llama, "😀".encode()[:3])
    assert (stream.push(ids), stream.flush(), stream.flush()) == ("", "���", "")
    mixed = byte_ids(llama, b"\xff" + "你".encode() + b"\x80")
    assert llama.decode(mixed) == "�你�"


def test_byte_fallback_run_is_not_broken_by_hidden_tokens(tokenizers_by_kind: Kinds) -> None:
    llama = tokenizers_by_kind["llama"]
    first, second, third = byte_ids(llama, "你".encode())
    assert llama.decode([first, 2, second, third]) == "你"
    assert llama.decode([first, 2, second, third], skip_special_tokens=False) == "�</s>��"


def test_leading_space(tokenizers_by_kind: Kinds) -> None:
    for kind in ("llama", "unigram"):
        tokenizer = tokenizers_by_kind[kind]
        ids = [i for i in tokenizer.encode("hello world") if i not in tokenizer.special_ids]
        assert tokenizer.detokenizer().push(ids) == "hello world"
        assert tokenizer.detokenizer(prompt_ids=ids).push(ids) == " hello world"
        hidden = sorted(tokenizer.special_ids)
        assert tokenizer.detokenizer(prompt_ids=hidden).push(ids) == "hello world"


def test_a_prompt_that_ends_inside_a_character(tokenizers_by_kind: Kinds) -> None:
    llama = tokenizers_by_kind["llama"]
    ids = byte_ids(llama, "好你".encode())
    assert llama.detokenizer(prompt_ids=ids[:5]).push(ids[5:]) == "你"
    assert llama.detokenizer(prompt_ids=ids[:4]).push(ids[4:]) == "你"
    assert llama.detokenizer(prompt_ids=ids[:3]).push(ids[3:]) == "你"


def test_special_tokens_are_hidden_or_shown_and_added_ones_always_shown(tokenizers_by_kind: Kinds) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("<think>Ünï two words<|im_end|>")
    assert tokenizer.decode(ids) == "<think>Ünï two words"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|><think>Ünï two words<|im_end|>"


def test_an_unknown_decoder_takes_the_window_which_stays_bounded() -> None:
    backend = Tokenizer(models.WordLevel({f"<0x{b:02X}>": b for b in range(256)} | {"a": 256, "[x]": 257}, "[x]"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Strip("~", 0, 1)])
    backend.add_special_tokens([AddedToken("[x]", special=True)])
    assert build_table(backend, frozenset({257})) is None
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return backend.decode(ids, skip_special_tokens=False)

    stream = WindowDetokenizer(decode, lambda token_id: token_id < 257)
    assert [stream.push([i]) for i in "你".encode()] == ["", "", "你"]
    assert stream.push([257]) == ""
    text = stream.push([0xFF] * 1000 + [256])
    assert set(text) == {"�", "a"} and text.endswith("a")
    assert longest <= 2 * (WindowDetokenizer.max_pending_tokens + 1)


def test_stop_strings_are_held_back_until_decided() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("text </e") == StopUpdate("text ", None)
    assert matcher.push("nd") == StopUpdate("", None)
    assert matcher.push(" no </end>more") == StopUpdate("</end no ", "</end>")
    assert matcher.push("more") == StopUpdate("", "</end>")
    assert matcher.flush() == ""


def test_what_is_held_appears_on_flush() -> None:
    matcher = StopMatcher(["abc", "bcd"])
    assert matcher.push("xab").text == "x"
    assert (matcher.flush(), matcher.flush()) == ("ab", "")


@pytest.mark.parametrize(
    ("stops", "text", "sent", "matched"),
    [
        (["abc", "b"], "xabc", "xa", "b"),  # "b" is complete first: generation would have ended there.
        (["c", "abc", "bc"], "xabc", "x", "abc"),  # All complete with the same character: the longest.
        (["ab", "abc"], "xabc", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["你好"], "你你好吗", "你", "你好"),
        (["x", "x"], "axb", "a", "x"),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, sent: str, matched: str) -> None:
    for order in (stops, stops[::-1]):
        assert StopMatcher(order).push(text) == StopUpdate(sent, matched)
        single = StopMatcher(order)
        assert "".join(single.push(char).text for char in text) == sent
        assert single.matched == matched
        assert StopMatcher(order, include=True).push(text).text == sent + matched


def test_no_stop_strings_and_empty_ones() -> None:
    assert StopMatcher([]).push("anything") == StopUpdate("anything", None)
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"


def test_many_long_stop_strings_all_held_back() -> None:
    matcher = StopMatcher(["a" * n + "b" for n in range(1, 200)])
    sent = "".join(matcher.push("aaaaa").text for _ in range(4_000))
    assert len(sent) == 20_000 - 199
    assert matcher.push("b") == StopUpdate("", "a" * 199 + "b")


def test_stream_tells_which_tokens_were_used(tokenizers_by_kind: Kinds) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("hello world, hello again", add_special_tokens=False)
    stream = TextStream(tokenizer, stops=["ld, h"])
    piece = stream.push(ids)
    assert (piece.text, piece.matched_stop) == ("hello wor", "ld, h")
    assert "hello world, h" in tokenizer.decode(ids[: piece.tokens_used])
    assert "hello world, h" not in tokenizer.decode(ids[: piece.tokens_used - 1])
    assert "".join(piece.token_texts) == tokenizer.decode(ids[: piece.tokens_used])
    after = stream.push(ids)
    assert (after.text, after.matched_stop, after.tokens_used) == ("", "ld, h", 0)
    assert stream.finish() == ""


def test_stop_string_completed_only_by_the_end(tokenizers_by_kind: Kinds) -> None:
    llama = tokenizers_by_kind["llama"]
    stream = TextStream(llama, stops=["\ufffd"])
    assert stream.push(byte_ids(llama, b"a\xe4")).text == "a"
    assert (stream.finish(), stream.matched_stop) == ("", "\ufffd")


def test_minimum_of_tokens_and_included_stop(tokenizers_by_kind: Kinds) -> None:
    llama = tokenizers_by_kind["llama"]
    ids = byte_ids(llama, b"a.b.c.")
    assert TextStream(llama, stops=["."]).push(ids).text == "a"
    assert TextStream(llama, stops=["."], min_tokens=2).push(ids).text == "a.b"
    assert TextStream(llama, stops=["."], min_tokens=1).push(ids).tokens_used == 2
    assert TextStream(llama, stops=["."], include_stop=True).push(ids).text == "a."
