"""The decoder block of the native families: norms, attention, gated MLP, and how they are joined.

Every module yields from `wanted()` the tensors that it expects from the checkpoint and is usable after `finish()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.backends.torch.attention import AttentionOptions, KVShape, SdpaAttention
from weft.backends.torch.batch import StepBatch
from weft.backends.torch.config import DecoderConfig
from weft.backends.torch.linear import Linear, Wanted
from weft.backends.torch.rope import RopeTable, rotate

ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

NORM_BLOCK = 64
"""Tokens normed at once in half precision on CPU."""


class Module(Protocol):
    """A part of a model that loads its own tensors."""

    def wanted(self) -> Iterator[Wanted]: ...

    def finish(self) -> None: ...


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich, arXiv:1910.07467), computed in float32."""

    def __init__(self, name: str, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.eps = name, eps
        self.weight = torch.empty(width, dtype=dtype, device=device)

    def wanted(self) -> Iterator[Wanted]:
        yield Wanted(f"{self.name}.weight", self.weight)

    def finish(self) -> None:
        """Nothing to prepare."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension of x [T, ..., width]."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)
    if x.shape[0] <= NORM_BLOCK or x.device.type != "cpu":
        return _half_rms_norm(x, weight, eps)
    # in portions whose float32 copies stay in the cache: several times faster for a whole prompt
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], NORM_BLOCK):
        result[start : start + NORM_BLOCK] = _half_rms_norm(x[start : start + NORM_BLOCK], weight, eps)
    return result


def _half_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In half precision the result is rounded before it meets the weight, as the reference implementations do; the
    fused kernel would round once, at the end."""
    wide = x.float()
    wide.mul_(torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps)))
    return wide.to(x.dtype).mul_(weight)


class Attention:
    """Self-attention with fused query, key and value projections."""

    def __init__(self, name: str, layer: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.eps = layer, config.norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim
        self.turns, self.norm_kind = config.rope_layers[layer], config.qk_norm
        self.options = AttentionOptions(config.attention_scale, config.windows[layer])
        widths = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        if config.fused:
            widths = {"qkv_proj": sum(widths.values())}
        parts = [(f"{name}.{part}", width) for part, width in widths.items()]
        self.qkv = Linear(parts, config.hidden_size, config.qkv_bias, dtype, device)
        self.out = Linear([(f"{name}.o_proj", config.hidden_size)], heads * dim, config.o_bias, dtype, device)
        self.norms: list[RMSNorm] = []
        self._norm_weight: torch.Tensor | None = None
        if config.qk_norm != "none":
            sizes = (dim, dim) if config.qk_norm == "head" else (heads * dim, kv_heads * dim)
            for part, size in zip(("q_norm", "k_norm"), sizes, strict=True):
                self.norms.append(RMSNorm(f"{name}.{part}", size, config.norm_eps, dtype, device))

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def wanted(self) -> Iterator[Wanted]:
        yield from self.qkv.wanted()
        yield from self.out.wanted()
        for norm in self.norms:
            yield from norm.wanted()

    def finish(self) -> None:
        self.qkv.finish()
        self.out.finish()
        if self.norm_kind == "head":  # one weight per head, so that queries and keys are normed in one go
            counts = (self.num_heads, self.num_kv_heads)
            self._norm_weight = torch.cat(
                [norm.weight.expand(count, -1) for norm, count in zip(self.norms, counts, strict=True)]
            )

    def __call__(self, x: torch.Tensor, batch: StepBatch, rope: RopeTable, attention: SdpaAttention) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        mixed = self.qkv(x)
        border = (self.num_heads + self.num_kv_heads) * self.head_dim
        turning, values = mixed[:, :border], mixed[:, border:]
        if self.norm_kind == "full":
            query_width = self.num_heads * self.head_dim
            turning = torch.cat((self.norms[0](turning[:, :query_width]), self.norms[1](turning[:, query_width:])), 1)
        heads = turning.unflatten(1, (-1, self.head_dim))
        if self._norm_weight is not None:
            heads = rms_norm(heads, self._norm_weight, self.eps)
        if self.turns:
            heads = rotate(heads, rope)
        keys = heads[:, self.num_heads :].flatten(1)
        records = torch.cat((keys, values), 1)
        return self.out(attention(batch, self.layer, heads[:, : self.num_heads], records, self.options))


class GatedMLP:
    """down(act(gate(x)) · up(x)), gate and up in one projection (SwiGLU and kin, Shazeer, arXiv:2002.05202)."""

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        gate, up, down = (f"{name}.{part}" for part in names)
        parts = [(gate, intermediate_size), (up, intermediate_size)]
        if config.fused:
            parts = [(f"{name}.gate_up_proj", 2 * intermediate_size)]
        self.gate_up = Linear(parts, config.hidden_size, config.mlp_bias, dtype, device)
        self.down = Linear([(down, config.hidden_size)], intermediate_size, config.mlp_bias, dtype, device)
        self.width = intermediate_size
        self.activation = ACTIVATION_FUNCTIONS[config.activation]

    def wanted(self) -> Iterator[Wanted]:
        yield from self.gate_up.wanted()
        yield from self.down.wanted()

    def finish(self) -> None:
        self.gate_up.finish()
        self.down.finish()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        both = self.gate_up(x)
        return self.down(self.activation(both[:, : self.width]).mul_(both[:, self.width :]))
