"""Small tokenizers of every kind that matters, trained on a few lines and written as checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog. Don't stop, it's only text!",
    "hello world, hello again: the world says hello to you and to the fox",
    "你好，世界。今天天气很好，我们去公园散步吧。你好吗？我很好，谢谢。",
    "emoji 😀 family 👨‍👩‍👧‍👦 flag 🇨🇳 and café, naïve, résumé, 한국어, русский текст",
    "def f(x):\n    return x + 1  # comment\n\n",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def save(backend: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_byte_level(folder: Path) -> Path:
    """As GPT-2, Llama 3 and Qwen: BOS by post-processor, added tokens that are not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)])
    backend.add_tokens([AddedToken("Ünï", normalized=False)])
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]),
        ]
    )
    return save(backend, folder, {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})


def write_llama(folder: Path) -> Path:
    """As Llama 2's: BPE over "▁" with byte fallback, <s> by post-processor, one leading space stripped."""
    trained = Tokenizer(models.BPE())
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = normalizer
    trained.train_from_iterator(LINES[:3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    spec = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *sorted(spec["vocab"], key=spec["vocab"].__getitem__)]
    backend = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(pair) for pair in spec["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(
        backend,
        folder,
        {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"},
    )


def write_unigram(folder: Path) -> Path:
    """As T5's: Unigram with a Metaspace decoder, </s> at the end."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=180, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(LINES[:3], trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return save(backend, folder, {"eos_token": "</s>", "unk_token": "<unk>"})


def write_wordpiece(folder: Path) -> Path:
    """As BERT's: "##" continues a word; its decoder is no concatenation, so it takes the window."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return save(backend, folder, {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"})


def write_word_end(folder: Path) -> Path:
    """As the first GPT's: "</w>" ends a word, and the last token of a text is decoded differently."""
    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=260, end_of_word_suffix="</w>", special_tokens=["<end>"], show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    return save(backend, folder, {"eos_token": "<end>"})


BUILDERS: dict[str, Callable[[Path], Path]] = {
    "byte_level": write_byte_level,
    "llama": write_llama,
    "unigram": write_unigram,
    "wordpiece": write_wordpiece,
    "word_end": write_word_end,
}


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The plain definition: the stop string that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None
