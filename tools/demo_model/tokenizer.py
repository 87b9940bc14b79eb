"""Byte-level BPE of 4,096 tokens, trained on the generator's own text.

The merges are learnt on a stricter split than the one that is shipped (Qwen2's): a capital never merges with the space or
quote before it and a Han character never with its neighbour. So a name has the same tokens in prose, in a list and in
JSON, and the model can copy it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .generate import conversation

VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = range(3)
SHIPPED_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{Han}| ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{N}|[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s|\p{L}"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def sample_text(seed: int, documents: int) -> Iterator[str]:
    """Messages to learn the merges from, in the same mix of rows as in training."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(documents):
        for role, text in conversation(rng, rng.choice((128, 256, 256, 512))):
            yield role + "\n" + text


def train_tokenizer(seed: int, documents: int = 12_000) -> Tokenizer:
    """Learn the merges and return the tokenizer with the split that is shipped."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split(TRAINING_SPLIT)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(seed, documents), trainer)
    tokenizer.pre_tokenizer = split(SHIPPED_SPLIT)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[END],
        "model_max_length": 2048,
        "pad_token": SPECIAL[PAD],
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
