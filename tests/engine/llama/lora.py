"""The bundled model in float32 as GGUF, random LoRA adapters for it, and the same model with an adapter merged in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, LlamaFileType
from safetensors.torch import load_file

from tools.demo_model.export_gguf import add_metadata, add_tokenizer, gguf_name
from weft.backends.registry import BUNDLED_MODEL

RANK, ALPHA = 4, 8.0
TARGETS = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")

Pair = tuple[np.ndarray, np.ndarray]
"""A, float32 [rank, in], and B, float32 [out, rank]: the adapter adds ALPHA / RANK * B A to a weight [out, in]."""


def weights() -> dict[str, np.ndarray]:
    """Every tensor of the bundled model in float32, by llama.cpp's names."""
    tensors = load_file(BUNDLED_MODEL / "model.safetensors")
    return {gguf_name(name): tensor.to(torch.float32).numpy() for name, tensor in sorted(tensors.items())}


def adapter(seed: int, strength: float = 0.6) -> dict[str, Pair]:
    """Random pairs by the name of the weight that they change, by `strength` of its own size."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, weight in weights().items():
        if any(f".{target}." in name for target in TARGETS):
            a = rng.standard_normal((RANK, weight.shape[1])).astype(np.float32)
            b = rng.standard_normal((weight.shape[0], RANK)).astype(np.float32)
            pairs[name] = a, b * np.float32(strength * weight.std() / np.std(b @ a * ALPHA / RANK))
    return pairs


def write_adapter(path: Path, pairs: Mapping[str, Pair], *, kind: str = "adapter") -> Path:
    """The adapter as llama.cpp's own converter writes it."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    _finish(writer)
    return path


def write_model(path: Path, pairs: Mapping[str, Pair] | None = None, *, split_max_tensors: int = 0) -> Path:
    """The bundled model in float32, with an adapter merged into its weights if one is given; in one file, or in
    several of so many tensors."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "qwen3", split_max_tensors=split_max_tensors)
    add_metadata(writer, config, LlamaFileType.ALL_F32)
    add_tokenizer(writer, BUNDLED_MODEL, config)
    for name, weight in weights().items():
        if pairs is not None and name in pairs:
            a, b = pairs[name]
            weight = weight + np.float32(ALPHA / RANK) * (b @ a)
        writer.add_tensor(name, weight, raw_dtype=GGMLQuantizationType.F32)
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
