"""Muon for the matrices, AdamW for the embedding and the norms."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from .model import DemoModel

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MUON_RATE, ADAM_RATE = 5e-3, 3e-3


def orthogonalize(batch: Tensor) -> Tensor:
    """Bring the singular values of every matrix (rows <= columns) near one, in bfloat16 and five steps."""
    a, b, c = NEWTON_SCHULZ
    x = batch.to(torch.bfloat16)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


class Muon:
    """Momentum, orthogonalized in one batch per matrix shape."""

    def __init__(self, model: DemoModel, momentum: float = 0.95, decay: float = 0.05) -> None:
        self.momentum, self.decay = momentum, decay
        shape = model.shape
        self.weights: list[Tensor] = []
        self.parts: list[list[int]] = []
        for block in model.blocks:
            self.weights += [block.qkv, block.out, block.gate_up, block.down]
            self.parts += [list(shape.qkv_sizes), [shape.hidden], [shape.ffn, shape.ffn], [shape.hidden]]
        self.buffers = [torch.zeros_like(w) for w in self.weights]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with the learning rate times `scale`."""
        rate = MUON_RATE * scale
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for weight, buffer, sizes in zip(self.weights, self.buffers, self.parts, strict=True):
            assert weight.grad is not None
            buffer.lerp_(weight.grad, 1 - self.momentum)
            update = weight.grad.lerp(buffer, self.momentum)
            weight.mul_(1 - rate * self.decay)
            for part, piece in zip(weight.split(sizes), update.split(sizes), strict=True):
                tall = piece.shape[0] > piece.shape[1]
                piece = piece.T if tall else piece
                groups[tuple(piece.shape)].append((part, piece, tall))
        for size, members in groups.items():
            result = orthogonalize(torch.stack([piece for _, piece, _ in members])).float()
            for (part, _, tall), one in zip(members, result, strict=True):
                part.add_(one.T if tall else one, alpha=-rate * 0.2 * max(size) ** 0.5)

    def state(self) -> list[Tensor]:
        return self.buffers

    def load(self, state: list[Tensor]) -> None:
        for buffer, saved in zip(self.buffers, state, strict=True):
            buffer.copy_(saved)


class Optimizer:
    """Both optimizers behind one step."""

    def __init__(self, model: DemoModel) -> None:
        self.muon = Muon(model)
        matrices = {id(w) for w in self.muon.weights}
        rest = [p for p in model.parameters() if id(p) not in matrices]
        self.adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        self.parameters = list(model.parameters())

    def step(self, scale: float) -> float:
        """Clip, update, clear; returns the norm of the gradient."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self.adam.step()
        self.muon.step(scale)
        for parameter in self.parameters:
            parameter.grad = None
        return float(norm)

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.state(), "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.muon.load(state["muon"])
        self.adam.load_state_dict(state["adam"])
