"""Mixture-of-experts layer: a router picks `top_k` gated MLPs for each token (Shazeer et al., arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.backends.torch.config import DecoderConfig, MoEConfig
from weft.backends.torch.layers import GatedMLP, Module
from weft.backends.torch.linear import Linear


class MoE:
    """Softmax over all experts, then the best `top_k`, their weights brought to sum 1 if `normalise`."""

    def __init__(
        self, name: str, config: DecoderConfig, moe: MoEConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.moe = moe
        self.router = Linear([(f"{name}.gate", moe.num_experts)], config.hidden_size, False, dtype, device)
        self.experts = [
            GatedMLP(f"{name}.experts.{index}", config, moe.intermediate_size, dtype, device, moe.names)
            for index in range(moe.num_experts)
        ]

    def modules(self) -> Iterator[Module]:
        """Expert by expert, so that loading holds one unpacked expert at a time."""
        yield self.router
        yield from self.experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]. Each expert sees its tokens together, whoever sent them."""
        weights, chosen = torch.softmax(self.router(x).float(), -1).topk(self.moe.top_k, -1)
        if self.moe.normalise:
            weights /= weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        tokens = order // self.moe.top_k
        shares = weights.flatten()[order].to(x.dtype)[:, None]
        counts = torch.bincount(experts, minlength=self.moe.num_experts).tolist()
        result = torch.zeros_like(x)
        start = 0
        for index, count in enumerate(counts):
            if count:
                mine = tokens[start : start + count]
                result.index_add_(0, mine, self.experts[index](x[mine]).mul_(shares[start : start + count]))
                start += count
        return result
