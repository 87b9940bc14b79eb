"""Streams a checkpoint into a native model, one tensor at a time.

Peak memory is the model plus one module: tensors are mapped, not read, cast on copying, and each module is packed as
soon as it is whole. Every tensor of the checkpoint must find its place and every place its tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft.backends.base import Progress
from weft.backends.checkpoint import Checkpoint, TensorInfo
from weft.backends.torch.layers import Module
from weft.backends.torch.linear import Wanted
from weft.core.errors import ModelLoadError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Buffers that older exports carry along; they are computed here.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def check_fit(modules: Iterable[Module], checkpoint: Checkpoint, *, tied_head: bool) -> None:
    """Compares names, shapes and dtypes before anything is read; `modules` may live on the meta device.

    Raises ModelLoadError naming the tensor that is missing, left over or of another shape.
    """
    used: dict[str, TensorInfo | None] = {}
    for module in modules:
        for wanted in module.wanted():
            used[wanted.name] = _find(checkpoint, wanted)
    if tied_head:  # a second copy of the embeddings
        used["lm_head.weight"] = None
    left = [name for name in checkpoint.tensors if name not in used and not name.endswith(IGNORED_SUFFIXES)]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ModelLoadError(f"{checkpoint.path}: {checkpoint.architecture} has no place for tensor "
                             f"{', '.join(repr(name) for name in left[:3])}{more}")  # fmt: skip


def load_weights(modules: Iterable[Module], checkpoint: Checkpoint, progress: Progress | None) -> None:
    """Fills `modules`, which `check_fit` has found to fit."""
    total, done = checkpoint.total_bytes, 0
    if progress is not None:
        progress(0, total)
    for module in modules:
        for wanted in module.wanted():
            info = _find(checkpoint, wanted)
            wanted.target.copy_(_as_tensor(checkpoint, wanted.name, info))
            done += info.num_bytes
            if progress is not None:
                progress(done, total)
        module.finish()
    if progress is not None:
        progress(total, total)


def _find(checkpoint: Checkpoint, wanted: Wanted) -> TensorInfo:
    info = checkpoint.tensors.get(wanted.name)
    if info is None:
        raise ModelLoadError(f"{checkpoint.path}: tensor {wanted.name!r} is missing "
                             f"(shape {list(wanted.target.shape)} is expected)")  # fmt: skip
    if info.shape != tuple(wanted.target.shape):
        raise ModelLoadError(f"{info.file}: tensor {wanted.name!r} has shape {list(info.shape)}, "
                             f"expected {list(wanted.target.shape)}")  # fmt: skip
    if info.dtype not in DTYPES:
        raise ModelLoadError(f"{info.file}: tensor {wanted.name!r} has dtype {info.dtype}, "
                             f"supported are {', '.join(DTYPES)} (no quantised weights)")  # fmt: skip
    return info


def _as_tensor(checkpoint: Checkpoint, name: str, info: TensorInfo) -> torch.Tensor:
    """The tensor as a view of the mapped file."""
    dtype = DTYPES[info.dtype]
    raw = checkpoint.read(name)
    if raw.ctypes.data % dtype.itemsize:  # the format does not promise alignment
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).view(info.shape)
