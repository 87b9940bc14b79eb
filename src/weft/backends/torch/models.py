"""The native decoder: embedding, blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.backends.torch.attention import KVShape, SdpaAttention
from weft.backends.torch.batch import StepBatch
from weft.backends.torch.config import DecoderConfig
from weft.backends.torch.layers import Attention, GatedMLP, Module, RMSNorm
from weft.backends.torch.linear import Linear, Wanted
from weft.backends.torch.moe import MoE
from weft.backends.torch.rope import Rope, RopeTable

LogitsOf = Callable[[int, int], torch.Tensor]
"""(start, stop) -> float32 logits [stop - start, vocabulary] of those of the wanted tokens."""


class Model(Protocol):
    """What the backend runs: a native decoder or the adapter."""

    kv_shapes: tuple[KVShape, ...]
    windows: tuple[int | None, ...]
    vocab_size: int
    kv_dtype: torch.dtype

    def forward(self, batch: StepBatch, attention: SdpaAttention, wanted: torch.Tensor) -> LogitsOf:
        """Computes the step; wanted int64 [n]: the tokens whose logits will be asked for."""
        ...


class Embedding:
    """Token embeddings [vocabulary, hidden]."""

    def __init__(self, name: str, count: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self.weight = torch.empty(count, width, dtype=dtype, device=device)

    def wanted(self) -> Iterator[Wanted]:
        yield Wanted(f"{self.name}.weight", self.weight)

    def finish(self) -> None:
        """Nothing to prepare."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class DecoderLayer:
    """One block: attention and MLP, each added to the residual stream."""

    def __init__(self, index: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        name = f"model.layers.{index}"
        moe = config.moe[index]
        self.attention = Attention(f"{name}.self_attn", index, config, dtype, device)
        self.mlp: MoE | GatedMLP
        if moe is not None:
            self.mlp = MoE(f"{name}.{moe.block}", config, moe, dtype, device)
        else:
            self.mlp = GatedMLP(f"{name}.mlp", config, config.intermediate_size, dtype, device)
        norms = ("input_layernorm", "post_attention_layernorm")
        if config.post_norm:
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        self.norms = [RMSNorm(f"{name}.{part}", config.hidden_size, config.norm_eps, dtype, device) for part in norms]
        self.post_norm, self.scale = config.post_norm, config.residual_scale

    def modules(self) -> Iterator[Module]:
        yield from self.norms
        yield self.attention
        if isinstance(self.mlp, MoE):
            yield from self.mlp.modules()
        else:
            yield self.mlp

    def __call__(self, x: torch.Tensor, batch: StepBatch, rope: RopeTable, attention: SdpaAttention) -> torch.Tensor:
        """x [T, hidden], changed in place."""
        first, second = self.norms
        if self.post_norm:
            x.add_(first(self.attention(x, batch, rope, attention)))
            return x.add_(second(self.mlp(x)))
        x.add_(self.attention(first(x), batch, rope, attention), alpha=self.scale)
        return x.add_(self.mlp(second(x)), alpha=self.scale)


class Decoder:
    """A native model. Loads through `modules` (see loader.py), then runs steps."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.vocab_size, self.windows, self.kv_dtype = config.vocab_size, config.windows, dtype
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, dtype, device)
        self.layers = [DecoderLayer(index, config, dtype, device) for index in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, dtype, device)
        self.head = Linear([("lm_head", config.vocab_size)], config.hidden_size, False, dtype, device)
        self.rope = Rope(config.rope, config.head_dim, dtype, device)
        self.kv_shapes = tuple(layer.attention.kv_shape for layer in self.layers)

    def modules(self) -> Iterator[Module]:
        yield self.embedding
        for layer in self.layers:
            yield from layer.modules()
        yield self.norm
        if not self.config.tied:
            yield self.head

    def ready(self) -> None:
        """To be called when all modules are loaded."""
        if self.config.tied:
            self.head.share(self.embedding.weight)

    def forward(self, batch: StepBatch, attention: SdpaAttention, wanted: torch.Tensor) -> LogitsOf:
        x = self.embedding(batch.token_ids)
        if self.config.embedding_scale != 1.0:
            x *= self.config.embedding_scale
        table = self.rope.table(batch.plan.positions)
        for layer in self.layers:
            x = layer(x, batch, table, attention)
        normed = self.norm(x[wanted])

        def logits_of(start: int, stop: int) -> torch.Tensor:
            logits = self.head(normed[start:stop]).float()
            return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

        return logits_of
