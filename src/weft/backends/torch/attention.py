"""The KV pool and attention over it.

A slot's record in a layer is one row of a matrix: the token's keys of all heads, then its values. So a token is written
by one copy and a sequence is gathered by one index. Only this module knows that layout.

Attention kinds are looked up in `ATTENTION_KINDS`; `sdpa` uses PyTorch's scaled dot product attention and runs on any
device. Query heads that share a KV head are folded into the query length (decode) or expanded without a copy (extend).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.backends.steps import Cancellation
from weft.backends.torch.batch import AttentionLayout, DecodeGroup, ExtendRow, Keys, StepBatch


@dataclass(frozen=True, slots=True)
class KVShape:
    """Widths of one layer's keys and values."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks for beyond plain attention.

    scale: factor on q·k; window: as in `DecoderConfig.windows`; softcap: scores s become c·tanh(s/c) (Gemma 2);
    sinks: [heads] extra logits that take part in the softmax but add no value (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class KVPool:
    """Keys and values of all layers: per layer a matrix [num_slots, width]."""

    def __init__(self, shapes: Sequence[KVShape], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = tuple(shapes)
        self.layers = [torch.zeros(num_slots, shape.width, dtype=dtype, device=device) for shape in self.shapes]
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def write(self, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """records [T, width] go to slots int64 [T]."""
        self.layers[layer].index_copy_(0, slots, records)

    def read(self, layer: int, keys: Keys) -> torch.Tensor:
        """Records [count, width], in place where the slots are neighbours. Valid until the next read."""
        pool = self.layers[layer]
        if keys.table is None:
            return pool[keys.first : keys.first + keys.count]
        # A buffer that stays: fresh pages from the system would cost several times the copy itself.
        needed = keys.count * pool.shape[1]
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed + needed // 4, dtype=pool.dtype, device=pool.device)
        gathered = self._scratch[:needed].view(keys.count, pool.shape[1])
        torch.index_select(pool, 0, keys.table, out=gathered)
        return gathered


class SdpaAttention:
    """Paged attention through `scaled_dot_product_attention`."""

    def __init__(self, pool: KVPool, cancellation: Cancellation) -> None:
        self._pool = pool
        self._cancellation = cancellation

    def __call__(
        self, batch: StepBatch, layer: int, queries: torch.Tensor, records: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Stores the new records, then attends.

        queries [T, heads, key_dim]; records [T, width] (keys then values) -> [T, heads * value_dim].
        Raises StepCancelled: every layer comes by here, so here a step can be broken off.
        """
        self._cancellation.check(batch.plan.step)
        shape = self._pool.shapes[layer]
        self._pool.write(layer, batch.slots, records)
        layout: AttentionLayout = batch.layouts[options.window]
        if len(layout.decode) == 1 and layout.decode[0].tokens is None:
            return self._decode(layout.decode[0], layer, shape, queries, options)
        result = queries.new_empty(queries.shape[0], queries.shape[1] * shape.value_dim)
        for group in layout.decode:
            result.index_copy_(0, group.tokens, self._decode(group, layer, shape, queries[group.tokens], options))
        for row in layout.extend:
            self._extend(row, layer, shape, queries, records, options, result)
        return result

    def _decode(
        self, group: DecodeGroup, layer: int, shape: KVShape, queries: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """queries [n, heads, key_dim] -> [n, heads * value_dim]. The query group takes the place of query length."""
        keys, values = _split(self._pool.read(layer, group.keys).view(group.rows, group.length, shape.width), shape)
        folded = queries.reshape(group.rows, shape.num_heads, -1, shape.key_dim)
        attended = attend(folded, keys.transpose(1, 2), values.transpose(1, 2), group.mask, options, folded=True)
        return attended.reshape(group.rows, -1)

    def _extend(
        self,
        row: ExtendRow,
        layer: int,
        shape: KVShape,
        queries: torch.Tensor,
        records: torch.Tensor,
        options: AttentionOptions,
        result: torch.Tensor,
    ) -> None:
        """One row's new tokens, block by block, into `result`. The KV head takes the place of the batch."""
        stored = records[row.start : row.stop] if row.keys is None else self._pool.read(layer, row.keys)
        keys, values = (part.transpose(0, 1).unsqueeze(1) for part in _split(stored, shape))
        group = queries.shape[1] // shape.num_heads
        for block in row.blocks:
            span = slice(block.keys_from, block.keys_to)
            asking = queries[block.start : block.stop].reshape(-1, shape.num_heads, group, shape.key_dim)
            attended = attend(
                asking.permute(1, 2, 0, 3),
                keys[:, :, span].expand(-1, group, -1, -1),
                values[:, :, span].expand(-1, group, -1, -1),
                block.mask,
                options,
                folded=False,
            )
            target = result[block.start : block.stop].view(-1, shape.num_heads, group, shape.value_dim)
            target.copy_(attended.permute(2, 0, 1, 3))


ATTENTION_KINDS = {"sdpa": SdpaAttention}


def _split(records: torch.Tensor, shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Records [..., width] -> keys [..., heads, key_dim] and values [..., heads, value_dim], as views."""
    border = shape.num_heads * shape.key_dim
    keys = records[..., :border].unflatten(-1, (shape.num_heads, shape.key_dim))
    return keys, records[..., border:].unflatten(-1, (shape.num_heads, shape.value_dim))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    *,
    folded: bool,
) -> torch.Tensor:
    """Attention over [batch, heads, length, dim]; `mask` is added to the scores.

    folded: whether dimensions 1 and 2 of `queries` are (KV head, group) rather than (group, query) under a batch of
    KV heads; it matters only for `sinks`, which differ by head.
    """
    if options.softcap is None and options.sinks is None:
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=options.scale)
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return torch.matmul(torch.softmax(scores.float(), -1).to(values.dtype), values)
    kv_heads, group = queries.shape[1:3] if folded else queries.shape[:2]
    sinks = options.sinks.view(kv_heads, group)
    column = (sinks[None, :, :, None] if folded else sinks[:, :, None, None]).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, column.to(scores.dtype)), -1).float(), -1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
