"""The tokenizer of one checkpoint: text to ids, ids to text, chats to ids.

`BaseTokenizer` is what all tokenizers have in common; `Tokenizer` is that of a checkpoint folder, built on the
`tokenizers` library alone. Special tokens are handled once: what the post-processor adds (BOS, for one) is never added
a second time to a text that begins with it, and never to a rendered chat, whose template wrote its own.

Text of special tokens inside a user's text ("<|im_end|>") becomes the special token, as in `transformers` and vLLM.
`clean_up_tokenization_spaces` is not applied: it removes spaces that the model wrote, and cannot be streamed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from weft.core.errors import InvalidRequestError, ModelLoadError
from weft.text.chat_template import ChatTemplate
from weft.text.detokenizer import ByteDetokenizer, IncrementalDetokenizer, WindowDetokenizer
from weft.text.model_files import TokenizerFiles, read_text, read_tokenizer_files
from weft.text.token_table import build_table


class BaseTokenizer(ABC):
    """What a tokenizer offers. Immutable after loading; may be used from several threads at once.

    `vocab_size` is the largest id plus one, added tokens included (ids may have holes). `bos_token_id` is None if the
    checkpoint names none. `eos_token_ids` ends a generation, the checkpoint's main one first, each once. `special_ids`
    are hidden by `skip_special_tokens`. `chat` is None if the checkpoint has no chat template.
    """

    chat: ChatTemplate | None
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, in order. Releases the GIL. Errors: `InvalidRequestError` for a lone surrogate."""

    @abstractmethod
    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Unknown ids give nothing; bytes that form no character give U+FFFD."""

    @abstractmethod
    def detokenizer(
        self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A new incremental detokenizer whose text continues that of `prompt_ids`."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; b"" for unknown ids."""

    def token_text(self, token_id: int) -> str:
        """One token for display, as it reads in the middle of a text; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text. Errors: `InvalidRequestError` for a lone surrogate. Releases the GIL."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat; the template alone decides on special tokens. Arguments and errors of `chat_text`."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A chat as the text of one prompt.

        `template_kwargs` go to the template; `tools` and `documents` among them are the lists of those names. Errors:
        `InvalidRequestError` if there is no template, the template refuses, or a message is malformed.
        """
        if self.chat is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or set model.chat_template", param="messages"
            )
        extra = dict(template_kwargs or {})
        if "add_generation_prompt" in extra:
            message = "add_generation_prompt is a field of its own, not a template variable"
            raise InvalidRequestError(message, param="chat_template_kwargs")
        return self.chat.render(messages, add_generation_prompt=add_generation_prompt, **extra)


class Tokenizer(BaseTokenizer):
    """That of a checkpoint folder; use `Tokenizer.load`.

    `eos_token_ids`: the tokenizer's own first, then those of generation_config.json or else config.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles, chat: ChatTemplate | None) -> None:
        """`backend` is changed: special tokens that only the settings name are registered in it."""
        self._backend = backend
        self.chat = chat
        self.special_ids = _register_special_tokens(backend, files)
        self._ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self._shown_ids = self._ids - self.special_ids
        self.vocab_size = max(self._ids, default=-1) + 1
        self.bos_token_id = self._named_id(files, "bos_token")
        if self.bos_token_id is None:
            self.bos_token_id = files.bos_id
        own_eos = self._named_id(files, "eos_token")
        self.eos_token_ids = tuple(dict.fromkeys((*(() if own_eos is None else (own_eos,)), *files.eos_ids)))
        self._table = build_table(backend, self.special_ids)
        self._affixes = _affixes(backend)

    @classmethod
    def load(cls, model_dir: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Reads a checkpoint folder. `chat_template`, a template's text or its file's path, replaces the folder's own.

        Errors: `ModelLoadError` that names the missing or broken file, or the template's broken line.
        """
        files = read_tokenizer_files(model_dir)
        try:
            backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_path))
        except Exception as error:  # The library raises bare Exception for whatever is wrong with the file.
            raise ModelLoadError(f"{files.tokenizer_path}: not a usable tokenizer.json: {error}") from error
        backend.no_truncation()  # Some checkpoints ship training settings, which would cut or pad prompts silently.
        backend.no_padding()
        templates = files.templates if chat_template is None else given_template(chat_template)
        chat = ChatTemplate(templates, files.named) if templates else None
        return cls(backend, files, chat)

    def _named_id(self, files: TokenizerFiles, name: str) -> int | None:
        return self._backend.token_to_id(files.named[name]) if name in files.named else None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, in order. Texts are tokenized in parallel by native threads, the GIL released."""
        by_library = add_special_tokens and self._affixes is None
        try:
            # The "fast" call skips character offsets. Unlike `encode`, it releases the GIL, even for one text.
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=by_library)
        except TypeError as error:
            for index, text in enumerate(texts):
                check_text(text, index)
            raise InvalidRequestError(f"text cannot be tokenized: {error}") from error
        batch = [encoding.ids for encoding in encodings]
        if self._affixes is None or not add_special_tokens:
            return batch
        return [with_affixes(ids, *self._affixes) for ids in batch]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Unknown ids give nothing; bytes that form no character give U+FFFD."""
        if self._table is not None:
            return self._table.decode(ids, skip_special_tokens=skip_special_tokens)
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(list(ids)) + stream.flush()

    def detokenizer(
        self, *, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A new incremental detokenizer whose text continues that of `prompt_ids`."""
        if self._table is not None:
            return ByteDetokenizer(self._table, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens)
        shown = self._shown_ids if skip_special_tokens else self._ids
        return WindowDetokenizer(self._decode_window, shown.__contains__, prompt_ids=prompt_ids)

    def _decode_window(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; b"" for unknown ids.

        Exact for byte-level and byte-fallback tokenizers. For other decoders the UTF-8 form of the token's text.
        """
        if self._table is not None:
            return self._table.token_bytes(token_id)
        if token_id not in self._ids:
            return b""
        alone = self._decode_window([token_id])
        twice = self._decode_window([token_id, token_id])
        return (twice[len(alone) :] or alone).encode("utf-8")


def given_template(chat_template: str) -> dict[str, str]:
    """The setting's templates by name: it is a template's text or its file's path. Errors: `ModelLoadError`."""
    is_source = "{" in chat_template or "\n" in chat_template
    return {"default": chat_template if is_source else read_text(Path(chat_template))}


def _register_special_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> frozenset[int]:
    """Makes special what the settings name but tokenizer.json does not list as added; returns all special ids.

    Names that the vocabulary does not know are passed over: a new id would lie outside the model's embedding.
    """
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    names = dict.fromkeys((*files.named.values(), *files.extra))
    missing = [name for name in names if name not in added and backend.token_to_id(name) is not None]
    if missing:
        backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in missing])
    flagged = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    named = {i for name in files.named.values() if (i := backend.token_to_id(name)) is not None}
    return frozenset(flagged | named)


def _affixes(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the post-processor puts before and after a text, None if it does anything else to the ids."""
    whole = backend.encode("a", add_special_tokens=True)
    bare = backend.encode("a", add_special_tokens=False).ids
    mask = whole.special_tokens_mask
    start = mask.index(0) if 0 in mask else len(mask)
    end = start + len(bare)
    return (whole.ids[:start], whole.ids[end:]) if whole.ids[start:end] == bare else None


def with_affixes(ids: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
    """Adds prefix and suffix, but not the part of them that the text already begins or ends with."""
    if ids and prefix and ids[0] == prefix[0]:
        same = next(
            (n for n, (a, b) in enumerate(zip(ids, prefix, strict=False)) if a != b), min(len(ids), len(prefix))
        )
        ids = ids[same:]
    if ids and suffix and ids[-1] == suffix[-1]:
        length = next((n for n in range(len(suffix), 0, -1) if ids[-n:] == suffix[-n:]), 0)
        ids = ids[: len(ids) - length]
    return [*prefix, *ids, *suffix]


def check_text(text: object, index: int) -> None:
    """Errors: `InvalidRequestError` if it is no string, or not valid Unicode."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"text {index} of the batch is {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequestError(
            f"the text holds a lone surrogate ({found} at character {error.start}), which is not valid Unicode"
        ) from error
