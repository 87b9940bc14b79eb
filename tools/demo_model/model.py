"""A small Qwen3 for training, and its way to and from the Hugging Face format.

Query, key and value share one matrix here, and so do gate and up: fewer, larger products. They are split on saving.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .tokenizer import END, PAD, VOCABULARY

EXPLICIT_UP_TO = 128  # torch's fused attention is slow backwards on CPU, explicit scores win on short rows


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 704
    vocabulary: int = VOCABULARY
    theta: float = 1e5
    eps: float = 1e-6
    positions: int = 2048

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """One decoder layer: attention and SwiGLU, each with a norm before it."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            weight = torch.randn(rows, columns, generator=generator)
            return nn.Parameter(weight * (0.8 * scale / columns**0.5))

        self.input_norm = nn.Parameter(torch.ones(shape.hidden))
        self.post_norm = nn.Parameter(torch.ones(shape.hidden))
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.qkv = matrix(sum(shape.qkv_sizes), shape.hidden)
        self.out = matrix(shape.hidden, shape.heads * shape.head_dim, 0.5)
        self.gate_up = matrix(2 * shape.ffn, shape.hidden)
        self.down = matrix(shape.hidden, shape.ffn, 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        rows, length, _ = x.shape
        h = normalize(x, self.input_norm, s.eps)
        q, k, v = F.linear(h, self.qkv).split(s.qkv_sizes, dim=-1)
        q = normalize(q.view(rows, length, s.heads, s.head_dim), self.q_norm, s.eps)
        k = normalize(k.view(rows, length, s.kv_heads, s.head_dim), self.k_norm, s.eps)
        q = rotate(q.transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(k.transpose(1, 2), cos, sin).to(v.dtype)
        v = v.view(rows, length, s.kv_heads, s.head_dim).transpose(1, 2)
        groups = s.heads // s.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if length <= EXPLICIT_UP_TO:
            scores = (q @ k.mT).float() * s.head_dim**-0.5
            after = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(after, float("-inf")).softmax(-1).to(v.dtype) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.out)
        gate, up = F.linear(normalize(x, self.post_norm, s.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class DemoModel(nn.Module):
    """The decoder with tied embeddings."""

    def __init__(self, shape: Shape | None = None, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden, generator=generator) * 0.02)
        self.blocks = nn.ModuleList(Block(shape, generator) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        if length not in self.tables:
            dim = self.shape.head_dim
            inverse = self.shape.theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse).repeat(1, 2)
            self.tables[length] = angles.cos(), angles.sin()
        return self.tables[length]

    def forward(self, ids: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
        """Mean loss over the chosen flat positions; logits are computed only there."""
        cos, sin = self.rope(ids.shape[1])
        x = F.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = normalize(x.flatten(0, 1)[chosen], self.norm, self.shape.eps)
        return F.cross_entropy(F.linear(x, self.embedding).float(), targets.flatten()[chosen])

    def to_tensors(self) -> dict[str, Tensor]:
        """The weights under Hugging Face's names, in bfloat16."""
        result = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for i, block in enumerate(self.blocks):
            p = f"model.layers.{i}."
            q, k, v = block.qkv.split(self.shape.qkv_sizes)
            gate, up = block.gate_up.chunk(2)
            result |= {
                p + "input_layernorm.weight": block.input_norm,
                p + "post_attention_layernorm.weight": block.post_norm,
                p + "self_attn.q_norm.weight": block.q_norm,
                p + "self_attn.k_norm.weight": block.k_norm,
                p + "self_attn.q_proj.weight": q,
                p + "self_attn.k_proj.weight": k,
                p + "self_attn.v_proj.weight": v,
                p + "self_attn.o_proj.weight": block.out,
                p + "mlp.gate_proj.weight": gate,
                p + "mlp.up_proj.weight": up,
                p + "mlp.down_proj.weight": block.down,
            }
        return {name: t.detach().to(torch.bfloat16).contiguous().clone() for name, t in result.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `to_tensors`."""
        with torch.no_grad():
            self.embedding.copy_(tensors["model.embed_tokens.weight"])
            self.norm.copy_(tensors["model.norm.weight"])
            for i, block in enumerate(self.blocks):
                p = f"model.layers.{i}."
                block.input_norm.copy_(tensors[p + "input_layernorm.weight"])
                block.post_norm.copy_(tensors[p + "post_attention_layernorm.weight"])
                block.q_norm.copy_(tensors[p + "self_attn.q_norm.weight"])
                block.k_norm.copy_(tensors[p + "self_attn.k_norm.weight"])
                block.qkv.copy_(torch.cat([tensors[f"{p}self_attn.{n}_proj.weight"] for n in "qkv"]))
                block.out.copy_(tensors[p + "self_attn.o_proj.weight"])
                block.gate_up.copy_(torch.cat([tensors[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up")]))
                block.down.copy_(tensors[p + "mlp.down_proj.weight"])


def config(shape: Shape) -> dict[str, Any]:
    """config.json; old and new readers look for rope and dtype under different names, so both are there."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.ffn,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": shape.positions,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "rope_theta": shape.theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


GENERATION = {
    "do_sample": True,
    "eos_token_id": [END, PAD],
    "max_new_tokens": 512,
    "pad_token_id": PAD,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
}


def save_model(model: DemoModel, folder: Path) -> None:
    """Write weights and configuration so that any Qwen3 reader can load them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", config(model.shape)), ("generation_config.json", GENERATION)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    path = folder / "model.safetensors"
    save_file(model.to_tensors(), path, metadata={"format": "pt"})
    os.chmod(path, 0o644)


def load_model(folder: Path) -> DemoModel:
    model = DemoModel()
    model.load_tensors(load_file(folder / "model.safetensors"))
    return model
