"""Embedding models of random weights, written at test time, and a BERT in numpy to compare one of them with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import PoolingType, TokenType

from weft.backends.registry import BUNDLED_MODEL

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
WORDS = ("the", "cat", "sat", "on", "mat", "dog", "runs", "poison", "hello", "world")
VOCABULARY = (*SPECIAL, *("▁" + word for word in WORDS), *("▁" + letter for letter in LETTERS), *LETTERS, "ing", "s's")
"""As llama.cpp has WordPiece: "▁" where a word begins, nothing where it goes on."""
POISON = VOCABULARY.index("▁poison")

DIM, HEADS, INNER, LAYERS, CONTEXT = 32, 4, 64, 2, 300
EPSILON = 1e-5

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class TinyBert:
    """Where it is, and its tensors by name."""

    path: Path
    pooling: str
    tensors: dict[str, Array] = field(default_factory=dict)

    def vector(self, ids: list[int]) -> Array:
        """float32 [DIM] of length 1, computed in float64 by the formulas of the paper (Devlin et al., 2018)."""
        w = {name: tensor.astype(np.float64) for name, tensor in self.tensors.items()}
        x = w["token_embd.weight"][ids] + w["token_types.weight"][0] + w["position_embd.weight"][: len(ids)]
        x = _norm(x, w, "token_embd_norm")
        for layer in range(LAYERS):
            block = f"blk.{layer}."
            q, k, v = (_split(_linear(x, w, f"{block}attn_{name}")) for name in "qkv")
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(DIM // HEADS)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mixed = (weights @ v).transpose(1, 0, 2).reshape(len(ids), DIM)
            x = _norm(x + _linear(mixed, w, f"{block}attn_output"), w, f"{block}attn_output_norm")
            inner = _linear(x, w, f"{block}ffn_up")
            inner = inner / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
            x = _norm(x + _linear(inner, w, f"{block}ffn_down"), w, f"{block}layer_output_norm")
        pooled = {"mean": x.mean(axis=0), "cls": x[0], "last": x[-1]}[self.pooling]
        return (pooled / np.linalg.norm(pooled)).astype(np.float32)


def _linear(x: Any, w: dict[str, Any], name: str) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(x: Any, w: dict[str, Any], name: str) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + EPSILON) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _split(x: Any) -> Any:
    return x.reshape(len(x), HEADS, DIM // HEADS).transpose(1, 0, 2)


def write_bert(path: Path, pooling: str = "cls", *, tokens: tuple[str, ...] = VOCABULARY) -> TinyBert:
    """A BERT with WordPiece. The vector of the word "poison" is no number. `pooling` "rank": as a reranker says."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType[pooling.upper()])
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)
    writer.add_unk_token_id(UNK)
    writer.add_pad_token_id(PAD)
    writer.add_mask_token_id(MASK)
    model = TinyBert(path, pooling)
    rng = np.random.default_rng(7)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 if "embd" in name else 0.3
        tensor = (rng.standard_normal(shape) * scale).astype(np.float32)
        model.tensors[name] = tensor + (1 if "norm.weight" in name else 0)

    add("token_embd.weight", len(tokens), DIM)
    add("token_types.weight", 2, DIM)
    add("position_embd.weight", CONTEXT, DIM)
    blocks = [f"blk.{layer}." for layer in range(LAYERS)]
    for name in ("token_embd_norm", *(f"{b}{n}_output_norm" for b in blocks for n in ("attn", "layer"))):
        add(f"{name}.weight", DIM)
        add(f"{name}.bias", DIM)
    for block in blocks:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}{name}.weight", DIM, DIM)
            add(f"{block}{name}.bias", DIM)
        for name, rows, columns in (("ffn_up", INNER, DIM), ("ffn_down", DIM, INNER)):
            add(f"{block}{name}.weight", rows, columns)
            add(f"{block}{name}.bias", rows)
    model.tensors["token_embd.weight"][POISON] = np.nan
    _write(writer, model.tensors)
    return model


def write_causal(path: Path, pooling: str | None) -> Path:
    """A Llama with the bundled model's vocabulary, which adds its end token to texts; `pooling` None names none."""
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    if pooling is not None:
        writer.add_pooling_type(PoolingType[pooling.upper()])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    rng = np.random.default_rng(8)
    tensors: dict[str, Array] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = (rng.standard_normal(shape) * (1.0 if "embd" in name else 0.3)).astype(np.float32)

    add("token_embd.weight", len(tokens), DIM)
    tensors["output_norm.weight"] = np.ones(DIM, np.float32)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{block}{name}.weight"] = np.ones(DIM, np.float32)
        for name, rows, columns in (
            ("attn_q", DIM, DIM),
            ("attn_k", DIM // 2, DIM),
            ("attn_v", DIM // 2, DIM),
            ("attn_output", DIM, DIM),
            ("ffn_gate", INNER, DIM),
            ("ffn_up", INNER, DIM),
            ("ffn_down", DIM, INNER),
        ):
            add(f"{block}{name}.weight", rows, columns)
    _write(writer, tensors)
    return path


def _write(writer: gguf.GGUFWriter, tensors: dict[str, Array]) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
