"""Reads a Hugging Face checkpoint folder: config.json, generation_config.json and the safetensors files.

Owns every check that needs no tensor library: which files there are, whether each is whole, which tensors it holds.
Needs the standard library and numpy only, so that every backend can share it. Invariant: a `Checkpoint` that `open`
returned has a readable configuration, all its shards, and in them all tensors of its index, none of them cut short.

The file format is that of https://github.com/huggingface/safetensors (an 8-byte little-endian header length, a JSON
header, then the data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.backends.rope_parameters import RopeParameters, normalise_rope, scaled_context
from weft.core.errors import ModelLoadError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit; more means that the file is something else
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: bytes `begin` to `end` of `file`, counted from the file's start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose files were found whole.

    Attributes:
        config: config.json as written.
        text: the part of `config` that describes the text decoder (its `text_config` where nested).
        generation: generation_config.json, empty where there is none.
        tensors: every tensor by name, in the order of the files.
    """

    path: Path
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads configuration and headers; no weights. Raises ModelLoadError naming the file at fault."""
        path = Path(path)
        if not path.is_dir():
            raise ModelLoadError(f"model folder not found: {path}")
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path}: no config.json, so this is not a Hugging Face checkpoint folder")
        config = _read_json(path / "config.json")
        text = config.get("text_config")
        generation_path = path / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        return cls(path, config, text if isinstance(text, dict) else config, generation, _read_tensors(path))

    @property
    def architecture(self) -> str:
        """First entry of `architectures`, such as "Qwen3ForCausalLM"."""
        names = self.config.get("architectures") or self.text.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ModelLoadError(f"{self.path / 'config.json'}: `architectures` names no model class")
        return names[0]

    @property
    def dtype_name(self) -> str | None:
        """The dtype that the configuration names ("bfloat16", ...), if it does."""
        for source in (self.config, self.text):
            for key in ("dtype", "torch_dtype"):
                if isinstance(source.get(key), str):
                    return str(source[key]).removeprefix("torch.")
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens, from generation_config.json if it names any, else from config.json."""
        for source in (self.generation, self.config, self.text):
            value = source.get("eos_token_id")
            if isinstance(value, int):
                return (value,)
            if isinstance(value, list) and value:
                return tuple(int(token) for token in value)
        return ()

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence that the positions allow, rope scaling counted in."""
        for key in CONTEXT_KEYS:
            value = self.text.get(key)
            if isinstance(value, int) and value > 0:
                return scaled_context(value, self.rope)
        raise ModelLoadError(f"{self.path / 'config.json'}: no context length (looked for {', '.join(CONTEXT_KEYS)})")

    @property
    def rope(self) -> RopeParameters | None:
        """Rotary embedding parameters, or None where they differ between layer types or are absent."""
        return normalise_rope(self.text, self.path / "config.json")

    @property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """The raw bytes of one tensor, mapped from the file (copy on write, so writing never reaches the file)."""
        info = self.tensors[name]
        if info.num_bytes == 0:
            return np.empty(0, np.uint8)
        return np.memmap(info.file, np.uint8, mode="c", offset=info.begin, shape=(info.num_bytes,))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: a JSON object is expected, found {type(content).__name__}")
    return content


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    index = path / INDEX_NAME
    if index.is_file():
        return _read_indexed(path, index)
    single = path / "model.safetensors"
    # consolidated.*.safetensors are second copies under other tensor names, which some publishers add
    others = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    files = [single] if single.is_file() else others
    if not files:
        if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
            raise ModelLoadError(f"{path}: only pickled weights (.bin, .pt) found; convert them to safetensors first")
        raise ModelLoadError(f"{path}: no weights (no *.safetensors file)")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(file))
    return tensors


def _read_indexed(path: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelLoadError(f"{index}: no `weight_map` from tensor names to files")
    tensors: dict[str, TensorInfo] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if Path(shard).name != shard:
            raise ModelLoadError(f"{index}: shard {shard!r} lies outside the model folder")
        if not (path / shard).is_file():
            raise ModelLoadError(f"{path / shard}: shard is missing (named in {INDEX_NAME})")
        tensors.update(read_header(path / shard))
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ModelLoadError(f"{path / shard}: tensor {name!r} is missing (named in {INDEX_NAME})")
    return {name: tensors[name] for name in weight_map}


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file. Raises ModelLoadError for a file that is cut short or malformed."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or length > MAX_HEADER_BYTES:
            raise ModelLoadError(f"{file}: not a safetensors file (header length {length}, file of {size} bytes)")
        if size < 8 + length:
            raise ModelLoadError(f"{file}: truncated: {8 + length} bytes of header expected, file has {size} bytes")
        try:
            header = json.loads(stream.read(length))
            tensors = {
                name: _tensor_info(file, name, entry, 8 + length)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{file}: malformed safetensors header: {error}") from error
    expected = max((info.end for info in tensors.values()), default=8 + length)
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header says"
        raise ModelLoadError(f"{file}: {kind}: {expected} bytes expected, {size} bytes found")
    return tensors


def _tensor_info(file: Path, name: str, entry: Mapping[str, Any], base: int) -> TensorInfo:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if dtype not in DTYPE_BITS:
        raise ModelLoadError(f"{file}: tensor {name!r} has unknown dtype {dtype!r}")
    needed = prod(shape) * DTYPE_BITS[dtype] // 8
    if begin < 0 or end - begin != needed or any(size < 0 for size in shape):
        raise ModelLoadError(f"{file}: tensor {name!r} of shape {list(shape)} {dtype} needs {needed} bytes, "
                             f"its header gives it {end - begin}")  # fmt: skip
    return TensorInfo(file, dtype, shape, base + begin, base + end)
