"""Rows of token ids with a mask of what the loss counts; every batch depends only on the seed and its number."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from .generate import Message, conversation
from .tokenizer import END, PAD, START

OTHER_LOSS_SHARE = 0.04


@dataclass
class Batch:
    """`ids` (rows, length + 1) and the flat positions whose next token counts."""

    ids: np.ndarray
    chosen: np.ndarray
    row: int


class Encoder:
    """Turns conversations into rows: the chat template's text, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.newline = tokenizer.encode("\n").ids
        self.head = {r: [START, *tokenizer.encode(r + "\n").ids] for r in ("system", "user", "assistant")}

    def encode(self, documents: list[list[Message]], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the mask of assistant tokens with their end mark, cut where a turn no longer fits."""
        texts = [text for document in documents for _, text in document]
        encoded = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        ids = np.full((len(documents), length), PAD, dtype=np.int64)
        mask = np.zeros((len(documents), length), dtype=bool)
        for row, document in enumerate(documents):
            at, full, turn = 0, False, []
            for role, _ in document:
                body = next(encoded).ids
                if full:
                    continue
                turn.append((role, body))
                if role == "user":
                    continue
                size = sum(len(self.head[r]) + len(b) + 1 + len(self.newline) for r, b in turn)
                if at + size > length and at > 0:
                    full = True
                    continue
                for r, b in turn:
                    piece = [*self.head[r], *b, END, *self.newline]
                    begin = at + len(self.head[r])
                    room = piece[: length - at]
                    ids[row, at : at + len(room)] = room
                    if r == "assistant":
                        mask[row, begin : begin + len(b) + 1] = True
                    at = min(at + len(piece), length)
                turn = []
        return ids, mask


def make_batch(encoder: Encoder, seed: int, step: int, row: int, tokens: int, only_sums: bool, late: int) -> Batch:
    """The batch of one training step: `tokens` tokens in rows of one length."""
    rng = random.Random(f"batch {seed} {step}")
    documents = [conversation(rng, row, only_sums, late) for _ in range(tokens // row)]
    ids, mask = encoder.encode(documents, row + 1)
    noise = np.random.default_rng([seed, step]).random(ids.shape) < OTHER_LOSS_SHARE
    counted = mask | (noise & (ids != PAD))
    return Batch(ids=ids, chosen=np.flatnonzero(counted[:, 1:]), row=row)
