"""The tokenizer of a GGUF file: its vocabulary in llama.cpp, its chat template in ours.

Two things that llama.cpp could do are done here:

- Special tokens in a text are found here, leftmost and longest first as in `weft.text.tokenizer`. llama.cpp's own
  search takes time that grows with the square of their number: 88 s for 160,000 of them.
- BOS and EOS are added here. llama.cpp adds BOS to a text that has one, and takes token 11 of a BPE vocabulary for BOS
  and for EOS where the file names none.

Unlike `Tokenizer`, no Unicode normalization is applied: a GGUF file does not tell which, and llama.cpp applies none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from weft.backends.llama_cpp.gguf import first_file
from weft.backends.llama_cpp.vocabulary import Vocabulary, load_bindings
from weft.core.errors import ModelLoadError
from weft.text.chat_template import ChatTemplate
from weft.text.detokenizer import ByteDetokenizer, IncrementalDetokenizer
from weft.text.tokenizer import BaseTokenizer, check_text, given_template, with_affixes

_TOKENS = "tokenizer.ggml.tokens"
_TEMPLATE = "tokenizer.chat_template"
_NAMED_IDS = {"unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding", "mask_token": "mask"}  # sic


class GgufTokenizer(BaseTokenizer):
    """Use `GgufTokenizer.load`. `vocab_size` counts unused tokens too, which have no text.

    `eos_token_ids` are all tokens at which llama.cpp ends a generation, the file's EOS first. `special_ids` are its
    control tokens and the unknown token.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any], templates: Mapping[str, str]) -> None:
        """`metadata` is that of the file, `templates` the chat templates by name. Errors: `ModelLoadError`."""
        library = load_bindings()
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self.bos_token_id = vocabulary.bos_id
        self.eos_token_ids = vocabulary.ending_ids
        hidden = library.LLAMA_TOKEN_ATTR_CONTROL | library.LLAMA_TOKEN_ATTR_UNKNOWN
        self.special_ids = frozenset(i for i, bits in enumerate(vocabulary.attributes) if bits & hidden)
        self._finder = _Finder(vocabulary, hidden | library.LLAMA_TOKEN_ATTR_USER_DEFINED)
        self._table = vocabulary.table(self.special_ids)
        self._prefix, self._suffix = vocabulary.affixes()
        self.chat = ChatTemplate(templates, _named_texts(vocabulary, metadata)) if templates else None

    @classmethod
    def load(cls, path: Path, *, chat_template: str | None = None) -> GgufTokenizer:
        """Reads a GGUF file or, from any one of them, the first of several; no weights are read.

        `chat_template`, a template's text or its file's path, replaces the file's own. Errors: `ModelLoadError` that
        names the file: missing, broken, a vocabulary that cannot be used, or a broken template with its line; also if
        llama-cpp-python is missing.
        """
        path, metadata = first_file(path, long_arrays=(_TOKENS,))
        _check_tokens(path, metadata)
        vocabulary = Vocabulary(path, metadata)
        if chat_template is not None:
            return cls(vocabulary, metadata, given_template(chat_template))
        try:
            return cls(vocabulary, metadata, _templates(metadata))
        except ModelLoadError as error:
            message = error.message
            raise ModelLoadError(message if str(path) in message else f"{path}: {message}") from error

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, one text after the other; most of the time without the GIL."""
        for index, text in enumerate(texts):
            check_text(text, index)
        batch: list[list[int]] = []
        for text, parts in zip(texts, self._finder.split(texts), strict=True):
            ids: list[int] = []
            for special_id, start, end in parts:
                ids += self._vocabulary.tokenize(text[start:end]) if special_id is None else (special_id,)
            batch.append(self._with_affixes(ids) if add_special_tokens else ids)
        return batch

    def _with_affixes(self, ids: list[int]) -> list[int]:
        """BERT's [CLS] and [SEP] also go around a text that has them, as where these models come from."""
        if self._vocabulary.is_wordpiece:
            return [*self._prefix, *ids, *self._suffix]
        return with_affixes(ids, self._prefix, self._suffix)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self._table.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        return ByteDetokenizer(self._table, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.token_bytes(token_id)


class _Finder:
    """Finds special tokens in texts: a `tokenizers` tokenizer that knows nothing else, so that all else is unknown."""

    def __init__(self, vocabulary: Vocabulary, kinds: int) -> None:
        """`kinds` are the attributes, joined by "or", of which a special token has one at least."""
        library, attributes = load_bindings(), vocabulary.attributes
        found = {vocabulary.text(i): i for i, bits in enumerate(attributes) if bits & kinds}
        self._backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        added = []
        for text, i in found.items():
            lstrip = bool(attributes[i] & library.LLAMA_TOKEN_ATTR_LSTRIP)
            rstrip = bool(attributes[i] & library.LLAMA_TOKEN_ATTR_RSTRIP)
            added.append(tokenizers.AddedToken(text, normalized=False, lstrip=lstrip, rstrip=rstrip))
        self._backend.add_tokens(added)
        self._ids = {self._backend.token_to_id(text): i for text, i in found.items()}

    def split(self, texts: Sequence[str]) -> Iterator[Iterable[tuple[int | None, int, int]]]:
        """Of each text its parts: a special token's id, else None, and where the part begins and ends."""
        for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False):
            yield ((self._ids.get(part), *span) for part, span in zip(encoding.ids, encoding.offsets, strict=True))


def _check_tokens(path: Path, metadata: Mapping[str, Any]) -> None:
    tokens = metadata.get(_TOKENS)
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{path}: it holds no vocabulary ({_TOKENS}); is it a whole language model?")
    named = [token for token in tokens if token]  # llama.cpp gives a name of its own to each empty one
    if len(set(named)) < len(named):  # llama.cpp would abort
        twice = Counter(named).most_common(1)[0][0]
        raise ModelLoadError(f"{path}: broken vocabulary: the token {twice!r} is there twice; convert the model anew")


def _named_texts(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … to their texts, as chat templates use them."""
    ids = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    ids |= {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_IDS.items()}
    return {name: vocabulary.text(i) for name, i in ids.items() if isinstance(i, int) and 0 <= i < vocabulary.size}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: `tokenizer.chat_template` is the default, others have their name behind another dot."""
    sources = {key.removeprefix(_TEMPLATE): text for key, text in metadata.items() if key.startswith(_TEMPLATE)}
    return {
        name.removeprefix(".") or "default": text
        for name, text in sources.items()
        if isinstance(text, str) and name[:1] in ("", ".")
    }
