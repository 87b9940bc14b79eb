"""A GGUF file's vocabulary in llama.cpp.

llama.cpp is trusted with plain text only, a few thousand characters at a time, and with what it does not answer with
`abort`: text for which there is no token is refused before. Texts for byte-level BPE are cut where their words end
anyway, because most of llama.cpp's pre-tokenizers are recursive (`std::regex`): one word of 50,000 letters overflows an
8 MiB stack and ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.backends.llama_cpp import library as bindings
from weft.core.errors import ModelLoadError, SettingsError
from weft.text.token_table import TokenTable

PIECE_CHARS = 4096
"""Byte-level BPE gets so many characters at a time: 128 bytes of stack for each are half a megabyte."""

# Every pre-tokenizer ends a word behind letters and digits that one of these follows. At the end of a line first, since
# for a few of them the spaces between words are no end.
_WORD_ENDS = (re.compile(r".*[^\W_](?=\n)", re.DOTALL), re.compile(r".*[^\W_](?=[\s.,!?。，、])", re.DOTALL))

# Those whose words are whole lines. llama.cpp finds lines without recursion, so that these need no cutting.
_LINES = frozenset({"gemma4", "sarvam-moe", "granite-embed-multi-311m"})


class Vocabulary:
    """Freed with the last one who holds it.

    `attributes[id]` are llama.cpp's LLAMA_TOKEN_ATTR_* of each token. `bos_id` and `eos_id` are None if the file names
    none. `ending_ids` are all tokens that end a generation, `eos_id` first.

    Its methods may run in several threads at once, without a lock: llama.cpp's vocabulary does not change once loaded,
    all that a call of `llama_tokenize` writes is its own (`llama_vocab::impl::tokenize` and its sessions), and the
    tables of Unicode are constants. Every call releases the GIL.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], model: Any = None) -> None:
        """`metadata` is that of the file, the first one if there are several. Errors: `ModelLoadError`, with reason.

        `model`: that of llama.cpp, where it is loaded already; it has to stay for as long as this is used.
        """
        self._path = path
        self._metadata = metadata
        self._library = lib = load_bindings()
        if model is None:
            model = self._load()
            # Not at exit: another thread may be tokenizing then.
            weakref.finalize(self, lib.llama_model_free, model).atexit = False
        self._vocab = lib.llama_model_get_vocab(model)
        self._kind = lib.llama_vocab_type(self._vocab)
        if self._kind == lib.LLAMA_VOCAB_TYPE_NONE:
            raise ModelLoadError(f"{path}: its vocabulary is not that of a model that reads text")
        self.is_wordpiece = bool(self._kind == lib.LLAMA_VOCAB_TYPE_WPM)
        kinds = {metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")}
        self._is_cut = self._is_bpe and not kinds & _LINES
        self.size: int = lib.llama_vocab_n_tokens(self._vocab)
        self.attributes: list[int] = [lib.llama_vocab_get_attr(self._vocab, i) for i in range(self.size)]
        self.bos_id = self._main_id("bos", lib.llama_vocab_bos(self._vocab))
        self.eos_id = self._main_id("eos", lib.llama_vocab_eos(self._vocab))
        if self.is_wordpiece:
            self._check_wordpiece()
        self.ending_ids = self._ending_ids()

    def _load(self) -> Any:
        params = self._library.llama_model_default_params()
        params.vocab_only = True
        no_devices = (ctypes.c_void_p * 1)()  # an empty list, so that no GPU is woken for this
        params.devices = ctypes.addressof(no_devices)
        with Failures() as failures:
            model = self._library.llama_model_load_from_file(os.fsencode(self._path), params)
        if not model:
            raise ModelLoadError(f"{self._path}: llama.cpp cannot read it: {failures.reason}")
        return model

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text; what is written like a control token is text like any other."""
        ids: list[int] = []
        for piece in _cut(text) if self._is_cut else (text,):
            ids += self._tokenize(piece.encode("utf-8"))
        return ids

    def _tokenize(self, data: bytes) -> list[int]:
        room = len(data) + 2
        while True:
            buffer = _array_type(self._library.llama_token, room.bit_length())()
            count = self._library.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), False, False)
            if count >= 0:
                ids: list[int] = buffer[:count]
                return ids
            room = -count  # what it needs; rare: a space may become three bytes and as many tokens

    def text(self, token_id: int) -> str:
        """A token as it is written in the file: of special tokens, what stands for them in a text."""
        text: bytes = self._library.llama_vocab_get_text(self._vocab, token_id)
        return text.decode("utf-8", "replace")

    def affixes(self) -> tuple[list[int], list[int]]:
        """The ids to put before and after a text; WordPiece (BERT) always has both."""
        add_bos = self.is_wordpiece or self._library.llama_vocab_get_add_bos(self._vocab)
        add_eos = self._library.llama_vocab_get_add_eos(self._vocab)
        prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        if self.is_wordpiece:
            return prefix, [self._library.llama_vocab_sep(self._vocab)]
        suffix = [self.eos_id] if add_eos and self.eos_id is not None else []
        return prefix, suffix

    def table(self, special_ids: frozenset[int]) -> TokenTable:
        """The bytes of all tokens. Errors: `ModelLoadError` if some text would be fatal to llama.cpp."""
        lib, pieces = self._library, self._pieces()
        # For these two kinds every byte must be a token: an unknown character ends the process, or a loop never.
        by_bytes = self._kind in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_RWKV)
        if by_bytes and len({piece for piece in pieces if piece and len(piece) == 1}) < 256:
            raise ModelLoadError(f"{self._path}: its vocabulary lacks tokens of single bytes, which any text may need")
        byte_tokens = any(bits & lib.LLAMA_TOKEN_ATTR_BYTE for bits in self.attributes)
        is_spm = self._kind in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_WPM)
        space_added = bool(self._metadata.get("tokenizer.ggml.add_space_prefix", is_spm))
        return TokenTable.from_pieces(pieces, special_ids, byte_tokens=byte_tokens, strip_left=int(space_added))

    def _pieces(self) -> list[bytes | None]:
        to_piece, vocab = self._library.llama_token_to_piece, self._vocab
        buffer = ctypes.create_string_buffer(256)
        pieces: list[bytes | None] = []
        for token_id in range(self.size):
            length = to_piece(vocab, token_id, buffer, len(buffer), 0, True)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = to_piece(vocab, token_id, buffer, len(buffer), 0, True)
            pieces.append(ctypes.string_at(buffer, length) if length else None)
        return pieces

    @property
    def _is_bpe(self) -> bool:
        return bool(self._kind == self._library.LLAMA_VOCAB_TYPE_BPE)

    def _main_id(self, name: str, claimed: int) -> int | None:
        """BOS or EOS. llama.cpp's default for byte-level BPE is any word: there only what the file says counts."""
        made_up = self._is_bpe and self._metadata.get(f"tokenizer.ggml.{name}_token_id") != claimed
        return None if made_up or not 0 <= claimed < self.size else claimed

    def _check_wordpiece(self) -> None:
        """llama.cpp aborts without the first two, and gives an id that does not exist without the third."""
        unknown = self._metadata.get("tokenizer.ggml.unknown_token_id", 100)
        ids = {"[CLS]": self.bos_id, "[SEP]": self._library.llama_vocab_sep(self._vocab), "[UNK]": unknown}
        for name, token_id in ids.items():
            if token_id is None or not 0 <= token_id < self.size:
                raise ModelLoadError(f"{self._path}: broken vocabulary: it names no token for {name}")

    def _ending_ids(self) -> tuple[int, ...]:
        lib = self._library
        ending = [i for i in range(self.size) if lib.llama_vocab_is_eog(self._vocab, i)]
        if self.eos_id is None:
            made_up = lib.llama_vocab_eos(self._vocab)
            control = lib.LLAMA_TOKEN_ATTR_CONTROL
            return tuple(i for i in ending if i != made_up or self.attributes[i] & control)
        return tuple(dict.fromkeys((self.eos_id, *ending)))


class Failures(logging.Filter):
    """Takes the errors that llama.cpp logs in this thread out of the log, to be told in our own."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._lines: list[str] = []

    @property
    def reason(self) -> str:
        """The first one, without the function's name."""
        return self._lines[0].partition(": ")[2] if self._lines else "no reason given"

    def __enter__(self) -> Failures:
        bindings.logger.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        bindings.logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or record.thread != self._thread:
            return True
        self._lines.append(record.getMessage())
        return False


def load_bindings() -> Any:
    """The module `llama_cpp`. Errors: `ModelLoadError` where it is missing or cannot be loaded."""
    try:
        return bindings.load_library()
    except SettingsError as error:
        raise ModelLoadError(f"a GGUF file needs llama-cpp-python ({bindings.HOW_TO_GET}): {error.message}") from error


@functools.cache
def _array_type(item: Any, bits: int) -> Any:
    """An array of 2**bits items; ctypes would make a new type for every length."""
    return item * (1 << bits)


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most `PIECE_CHARS` that end where words end, if in their second half there is such a place."""
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        limit, half = begin + PIECE_CHARS, begin + PIECE_CHARS // 2
        ends = (match.end() for pattern in _WORD_ENDS if (match := pattern.match(text, half, limit)))
        end = next(ends, limit)
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]
