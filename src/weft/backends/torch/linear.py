"""Linear layers, with weights reordered once for oneDNN where that is faster.

oneDNN wants weights in blocks that fit the processor; `F.linear` would reorder them in every call. A packed weight
takes the place of the original, which is released, so that packing costs no memory in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

PACKED_DTYPES = (torch.bfloat16, torch.float32)  # float16 gains nothing and loses at large batches
PACK_BATCH_SIZE = 32  # the batch size that the block shape is chosen for; measured fair from 1 to 1,024 rows


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a module expects from the checkpoint, and where it goes (a view of that shape)."""

    name: str
    target: torch.Tensor


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build and processor have oneDNN's packed linear for `dtype`; tried once on a small matrix."""
    if dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.arange(32 * 64, dtype=torch.float32).remainder(7).sub(3).view(32, 64).to(dtype)
    rows = torch.arange(3 * 64, dtype=torch.float32).remainder(5).sub(2).view(3, 64).to(dtype)
    try:
        return bool(torch.equal(_packed_linear(rows, _pack(weight), None), F.linear(rows, weight)))
    except (RuntimeError, AttributeError):  # an older processor, or a build without these operators
        return False


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_BATCH_SIZE)
    return packed


def _packed_linear(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


class Linear:
    """y = x·Wᵀ + b, where W is one matrix or several of the checkpoint's, stacked.

    Args:
        parts: (checkpoint name without suffix, output width) of each stacked matrix.
        in_features: width of x.
        bias: whether each part has a bias beside its weight.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts = tuple(parts)
        self.in_features = in_features
        self.out_features = sum(width for _, width in self.parts)
        self.dtype, self.device = dtype, device
        self.has_bias = bias
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None

    def wanted(self) -> Iterator[Wanted]:
        """Allocates, then yields what to load."""
        self.weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.device)
        if self.has_bias:
            self.bias = torch.empty(self.out_features, dtype=self.dtype, device=self.device)
        start = 0
        for name, width in self.parts:
            yield Wanted(f"{name}.weight", self.weight[start : start + width])
            if self.bias is not None:
                yield Wanted(f"{name}.bias", self.bias[start : start + width])
            start += width

    def finish(self) -> None:
        """Packs the loaded weight where possible and releases the original."""
        if self.weight is not None and self.device.type == "cpu" and packing_works(self.dtype):
            self._packed, self.weight = _pack(self.weight), None

    def share(self, weight: torch.Tensor) -> None:
        """Uses `weight` (another module's, such as tied embeddings) in place of a loaded one."""
        self.weight = weight
        self.finish()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, in_features] -> [n, out_features]."""
        if self._packed is not None:
            return _packed_linear(rows, self._packed, self.bias)
        if self.weight is None:
            raise RuntimeError(f"linear layer {self.parts[0][0]} was used before loading")
        return F.linear(rows, self.weight, self.bias)
