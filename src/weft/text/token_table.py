"""The bytes of every token, computed once per tokenizer.

Most decoders found in `tokenizer.json` are per-token rules in disguise: the text of a sequence is the concatenation of
fixed byte strings, one per id, plus a rule for the very start. `build_table` recognises those decoders and turns them
into a `TokenTable`, so that detokenizing costs one list access per token. It returns None for every other decoder.

Recognised: `ByteLevel` (GPT-2, Llama 3, Qwen, DeepSeek, …), `Metaspace` (T5, Unigram models), and the SentencePiece
chain `Replace*`, `ByteFallback`, `Fuse`, `Strip(left)` (Llama 2, Mistral, Gemma, Phi 3, …).

Invariant: for well-formed input `TokenTable.decode` equals the `tokenizers` library's own decoding. Where tokens do not
form valid UTF-8 there are two known differences, both on purpose:

- The library gives up a whole run of byte-fallback tokens for one bad byte in it. That cannot be streamed without
  holding a run of unknown length back, so here the valid characters of a run stay, and each byte that is not part of
  one becomes one U+FFFD, which is what SentencePiece itself does.
- An added token such as "café", whose characters all happen to be letters of the byte-level alphabet, is garbled by the
  library ("caf\\ufffd"). Here it stays as it is written.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "weft.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: one U+FFFD per undecodable byte (`replace` gives one per undecodable subsequence)."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes per id and the rules that join them.

    `pieces[id]` is the token's bytes in the middle of a text, None where no such id exists; `visible` is the same
    list with special tokens set to None. `errors` is the codec error handler for bytes that are not UTF-8.
    `strip_left` spaces are removed at the start of the text. `first_pieces`, if given, replaces `pieces` for the
    first visible token of a text (only those that differ are in it).
    """

    pieces: list[bytes | None]
    visible: list[bytes | None]
    errors: str
    strip_left: int
    first_pieces: Mapping[int, bytes]

    @classmethod
    def from_pieces(
        cls, pieces: Sequence[bytes | None], special_ids: frozenset[int], *, byte_tokens: bool, strip_left: int
    ) -> TokenTable:
        """The table of a vocabulary whose bytes are known. `byte_tokens`: bytes have tokens of their own ("<0xE4>")."""
        visible = [None if i in special_ids else piece for i, piece in enumerate(pieces)]
        return cls(list(pieces), visible, _EACH_BYTE if byte_tokens else "replace", strip_left, {})

    def view(self, *, skip_special_tokens: bool) -> list[bytes | None]:
        """The list to look ids up in; None marks ids that give no text at all."""
        return self.visible if skip_special_tokens else self.pieces

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; b"" for unknown ids."""
        return (self.pieces[token_id] or b"") if 0 <= token_id < len(self.pieces) else b""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence. Unknown ids give nothing, as in the `tokenizers` library."""
        view = self.view(skip_special_tokens=skip_special_tokens)
        size = len(view)
        known = [i for i in ids if 0 <= i < size and view[i] is not None]
        parts = [view[i] or b"" for i in known]
        if known and known[0] in self.first_pieces:
            parts[0] = self.first_pieces[known[0]]
        text = b"".join(parts).decode("utf-8", self.errors)
        left = min(self.strip_left, len(text) - len(text.lstrip(" ")))
        return text[left:]


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as in `tokenizer.json`, nested `Sequence`s flattened; empty if there is no decoder."""
    if backend.decoder is None:
        return []
    return _flatten(json.loads(backend.decoder.__getstate__()))


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] == "Sequence":
        return [step for inner in spec["decoders"] for step in _flatten(inner)]
    return [spec]


def build_table(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> TokenTable | None:
    """The table for this tokenizer's decoder, or None if its decoder is not a per-token rule known here."""
    steps = decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()} | added
    pieces: dict[int, bytes]
    first: dict[int, bytes] = {}
    errors, strip_left = _EACH_BYTE, 0
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        pieces, errors = _byte_level_pieces(tokens, added.keys()), "replace"
    elif kinds == ["Metaspace"]:
        pieces, first = _metaspace_pieces(tokens, steps[0])
    elif (strip := _sentencepiece_strip(steps)) is not None:
        pieces, strip_left = _sentencepiece_pieces(tokens, steps), strip
    else:
        return None
    by_id = [pieces.get(i) for i in range(max(pieces, default=-1) + 1)]
    visible = [None if i in special_ids else piece for i, piece in enumerate(by_id)]
    return TokenTable(by_id, visible, errors, strip_left, first)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character to byte: printable Latin-1 stands for itself, other bytes for U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(moved)}


def _byte_level_pieces(tokens: dict[int, str], added: Iterable[int]) -> dict[int, bytes]:
    # str.translate and the Latin-1 codec do in C what a loop over characters would do: 150,000 tokens in 0.1 s. The
    # Latin-1 characters outside the alphabet must fail to encode, hence the detour to U+FFFF.
    translation: dict[int, int] = dict.fromkeys(range(256), 0xFFFF)
    translation.update({ord(char): byte for char, byte in byte_alphabet().items()})
    pieces: dict[int, bytes] = {}
    for token_id, token in tokens.items():
        try:
            pieces[token_id] = token.translate(translation).encode("latin-1")
        except UnicodeEncodeError:
            pieces[token_id] = token.encode("utf-8")
    for token_id in added:
        try:
            pieces[token_id].decode("utf-8")
        except UnicodeDecodeError:
            pieces[token_id] = tokens[token_id].encode("utf-8")
    return pieces


def _metaspace_pieces(tokens: dict[int, str], spec: dict[str, Any]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    mark = spec["replacement"]
    pieces = {i: token.replace(mark, " ").encode("utf-8") for i, token in tokens.items()}
    first: dict[int, bytes] = {}
    if spec.get("prepend_scheme", "always") != "never":
        first = {i: token.replace(mark, "").encode("utf-8") for i, token in tokens.items() if mark in token}
    return pieces, first


def _sentencepiece_strip(steps: Sequence[dict[str, Any]]) -> int | None:
    """Leading spaces that the SentencePiece chain strips, or None if the steps are not such a chain."""
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        rest.pop(0)
    if rest and rest[0]["type"] == "ByteFallback":
        rest.pop(0)
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None  # Without Fuse a Strip would act on every token; without any step tokens are joined by spaces.
    if not rest:
        return 0
    last = rest.pop(0)
    plain = last["type"] == "Strip" and last["content"] == " " and last["stop"] == 0 and not rest
    return int(last["start"]) if plain else None


def _sentencepiece_pieces(tokens: dict[int, str], steps: Sequence[dict[str, Any]]) -> dict[int, bytes]:
    replacements = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
    bytes_too = any(s["type"] == "ByteFallback" for s in steps)
    pieces: dict[int, bytes] = {}
    for token_id, token in tokens.items():
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if bytes_too else None
        pieces[token_id] = bytes([int(byte[1], 16)]) if byte else token.encode("utf-8")
    return pieces
