"""Rotary position embedding on tensors (RoFormer, arXiv:2104.09864), in Hugging Face models' "rotate half" layout.

The table of a step is computed once and serves all layers. Invariant: a token's angles depend on its own position
only, never on the length of its sequence, so that a stored key stays valid for whoever continues from it. Under
dynamic NTK scaling a token beyond the original context therefore takes the frequencies of a sequence that ends with
it, which is also what incremental decoding in the reference implementation stores.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.backends.rope_parameters import RopeParameters
from weft.core.plan import Int32s

RopeTable = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine, each [T, 1, rotary width]; the sine's first half is negated."""


class Rope:
    """Turns positions into a table, and queries and keys by it."""

    def __init__(self, parameters: RopeParameters, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self._factor = parameters.inverse_frequencies(head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        self._parameters, self._head_dim = parameters, head_dim
        self._dtype, self._device = dtype, device

    def table(self, positions: Int32s) -> RopeTable:
        """positions int32 [T] -> cosine and signed sine, computed in float32."""
        columns = torch.from_numpy(positions.astype(np.float32)).to(self._device)[:, None]
        angles = columns * self._frequencies_at(positions)
        cosine, sine = angles.cos() * self._factor, angles.sin() * self._factor
        pair = (torch.cat((cosine, cosine), 1), torch.cat((-sine, sine), 1))
        return pair[0].to(self._dtype)[:, None], pair[1].to(self._dtype)[:, None]

    def _frequencies_at(self, positions: Int32s) -> torch.Tensor:
        rope = self._parameters
        if rope.kind != "dynamic" or positions.size == 0 or positions.max() < rope.max_position_embeddings:
            return self._frequencies
        dim = rope.rotary_dim(self._head_dim)
        thetas = np.array([rope.dynamic_theta(int(position) + 1, self._head_dim) for position in positions])
        powers = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        return torch.from_numpy((1.0 / thetas[:, None] ** powers).astype(np.float32)).to(self._device)


def rotate(heads: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Turns heads [T, n, head_dim] by the table; width beyond the table's is left as it is."""
    cosine, sine = table
    width = cosine.shape[-1]
    turning = heads if width == heads.shape[-1] else heads[..., :width]
    half = width // 2
    swapped = torch.cat((turning[..., half:], turning[..., :half]), -1)
    turned = (turning * cosine).addcmul_(swapped, sine)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), -1)
