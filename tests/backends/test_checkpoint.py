"""Reading checkpoints without a tensor library: what is accepted, and how each fault is named."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.backends.checkpoint import Checkpoint, read_header
from weft.core.errors import ModelLoadError

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "vocab_size": 10}


def write_shard(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_shard(tmp_path / "model.safetensors", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    return tmp_path


def configure(folder: Path, **changes: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return Checkpoint.open(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Checkpoint.open(folder)
    return caught.value.message


def test_reads_a_single_file(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.architecture == "LlamaForCausalLM" and checkpoint.max_context_tokens == 128
    info = checkpoint.tensors["a"]
    assert info.shape == (2, 3) and info.num_bytes == 24 == checkpoint.total_bytes
    array = checkpoint.read("a").view(np.float32).reshape(info.shape)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    array[0, 0] = 9  # a private copy: the file stays as it is
    assert checkpoint.read("a").view(np.float32)[0] == 0


def test_reads_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "x-1.safetensors")
    write_shard(folder / "x-2.safetensors", {"b": np.zeros(4, np.float32), "empty": np.zeros((0, 3), np.float32)})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "x-2.safetensors", "a": "x-1.safetensors"}}))
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.tensors) == ["b", "a"]  # what the index names, no more
    index.write_text(json.dumps({"weight_map": {"c": "x-2.safetensors"}}))
    assert "x-2.safetensors: tensor 'c' is missing" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"c": "x-3.safetensors"}}))
    assert "x-3.safetensors: shard is missing" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"c": "../x-1.safetensors"}}))
    assert "lies outside the model folder" in refusal(folder)
    index.write_text("{}")
    assert "no `weight_map`" in refusal(folder)


def test_missing_files(folder: Path) -> None:
    assert "model folder not found" in refusal(folder / "nowhere")
    (folder / "model.safetensors").unlink()
    assert "no weights (no *.safetensors file)" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


def test_broken_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 20, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert str(file) in refusal(folder)
    assert f"truncated: {len(whole)} bytes expected, {len(whole) - 1} bytes found" in refusal(folder)
    file.write_bytes(whole + b"x")
    assert "longer than its header says" in refusal(folder)
    file.write_bytes(b"PK\x03\x04" * 100)
    assert "not a safetensors file" in refusal(folder)
    file.write_bytes(struct.pack("<Q", 5) + b"[1,2]")
    assert "malformed safetensors header" in refusal(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes, its header gives it 4"),
        ({"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype 'X9'"),
        ({"dtype": "F32", "shape": [1]}, "malformed safetensors header"),
    ],
)
def test_bad_header_entries(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    file = tmp_path / "bad.safetensors"
    text = json.dumps({"a": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(ModelLoadError, match=message):
        read_header(file)


def test_broken_configuration(folder: Path) -> None:
    for text, message in (("{", "cannot be read as JSON"), ("[]", "a JSON object is expected")):
        (folder / "config.json").write_text(text)
        assert message in refusal(folder)
    with pytest.raises(ModelLoadError, match="names no model class"):
        _ = configure(folder, architectures=[]).architecture
    with pytest.raises(ModelLoadError, match="no context length"):
        _ = configure(folder, max_position_embeddings=None).max_context_tokens


def test_end_tokens(folder: Path) -> None:
    assert configure(folder).eos_token_ids == ()
    assert configure(folder, eos_token_id=3).eos_token_ids == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert configure(folder, eos_token_id=3).eos_token_ids == (4, 5)


def test_nested_text_config_and_dtype(folder: Path) -> None:
    text = {"max_position_embeddings": 77, "eos_token_id": 8, "torch_dtype": "torch.bfloat16"}
    checkpoint = configure(folder, text_config=text, max_position_embeddings=None)
    assert checkpoint.max_context_tokens == 77 and checkpoint.eos_token_ids == (8,)
    assert checkpoint.dtype_name == "bfloat16"
    assert configure(folder, dtype="float16").dtype_name == "float16"


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 128),
        ({"type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_context_counts_rope_scaling(folder: Path, scaling: dict[str, Any] | None, tokens: int) -> None:
    assert configure(folder, rope_scaling=scaling).max_context_tokens == tokens


def test_needs_no_tensor_library() -> None:
    modules = "weft.backends.checkpoint, weft.backends.rope_parameters, weft.backends.draw"
    code = f"import sys, {modules}; assert not {{'torch', 'transformers', 'safetensors'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
