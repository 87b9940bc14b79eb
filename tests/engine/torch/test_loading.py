"""What is wrong with a checkpoint or a setting is said at once, by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.torch.zoo import Zoo
from weft.backends.torch.backend import TorchBackend
from weft.core.errors import ModelLoadError, SettingsError


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    """A sharded Qwen3 checkpoint to break."""
    path = tmp_path / "model"
    shutil.copytree(zoo.path("qwen3"), path)
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrites the shard that holds tensor `name`."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if name in tensors:
            change(tensors)
            save_file({key: value.clone() for key, value in tensors.items()}, file)
            return file
    raise AssertionError(name)


def refusal(path: Path) -> str:
    start = time.monotonic()
    with pytest.raises(ModelLoadError) as caught:
        TorchBackend(path).load()
    assert time.monotonic() - start < 10  # seconds, even on a busy machine
    return caught.value.message


def test_missing_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in refusal(folder) and "missing" in refusal(folder)


def test_truncated_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 100)
    message = refusal(folder)
    assert str(shard) in message and f"{size} bytes expected" in message and f"{size - 100} bytes found" in message


def test_wrong_shape(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    file = edit_tensors(folder, name, lambda tensors: tensors.update({name: tensors[name][:, :-1]}))
    message = refusal(folder)
    assert message == f"{file}: tensor {name!r} has shape [64, 95], expected [64, 96]"


def test_missing_and_left_over_tensor(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model.layers.0.self_attn.q_norm.weight"
    content["weight_map"]["model.layers.0.oddity"] = content["weight_map"][name]
    edit_tensors(folder, name, lambda tensors: tensors.update({"model.layers.0.oddity": torch.zeros(3)}))
    index.write_text(json.dumps(content))
    assert "Qwen3ForCausalLM has no place for tensor 'model.layers.0.oddity'" in refusal(folder)
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    assert f"tensor {name!r} is missing (shape [16] is expected)" in refusal(folder)


def test_quantised_weights(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, name, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert f"tensor {name!r} has dtype I8" in refusal(folder)
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    assert "quantization_config" in refusal(folder)


def test_unknown_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["FrobnicatorForCausalLM"], model_type="frobnicator")
    assert "architecture FrobnicatorForCausalLM is not supported" in refusal(folder)
    edit_config(folder, architectures=["Qwen3ForSequenceClassification"], model_type="qwen3")
    assert "architecture Qwen3ForSequenceClassification is not supported" in refusal(folder)


def test_bad_configuration_values(folder: Path) -> None:
    edit_config(folder, num_key_value_heads=3)
    assert "num_attention_heads 4 is no multiple of num_key_value_heads 3" in refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "hidden_size is missing" in refusal(folder)


def test_adapter_names_a_missing_tensor(zoo: Zoo, tmp_path: Path) -> None:
    path = tmp_path / "gpt2"
    shutil.copytree(zoo.path("gpt2"), path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop("transformer.h.1.mlp.c_fc.weight", None)
        save_file(tensors, file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
        del content["weight_map"]["transformer.h.1.mlp.c_fc.weight"]
        index.write_text(json.dumps(content))
    assert "missing tensor 'transformer.h.1.mlp.c_fc.weight'" in refusal(path)


def test_progress_and_geometry(zoo: Zoo) -> None:
    seen: list[tuple[int, int]] = []
    backend = TorchBackend(zoo.path("qwen3"))
    geometry = backend.load(lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    assert seen[0] == (0, total) and seen[-1] == (total, total) and total > 100_000
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert geometry.num_layers == 3 and geometry.vocab_size == 211 and geometry.max_context_tokens == 512
    assert geometry.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert geometry.eos_token_ids == (2,)
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="before load, or after close"):
        backend.allocate_kv(4)


def test_settings_name_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape("dtype: 'int8' is not allowed (allowed: auto, float32")):
        TorchBackend(tmp_path, dtype="int8")
    with pytest.raises(SettingsError, match=re.escape("attention: 'fa' is not allowed (allowed: auto, sdpa)")):
        TorchBackend(tmp_path, attention="fa")
    with pytest.raises(SettingsError, match="threads: 0 is not allowed"):
        TorchBackend(tmp_path, threads=0)
    with pytest.raises(SettingsError, match="device: 'abacus' is not allowed"):
        TorchBackend(tmp_path, device="abacus")


def test_native_families_never_import_transformers(zoo: Zoo) -> None:
    code = (
        "import sys; from pathlib import Path; from weft.backends.torch.backend import TorchBackend;"
        f"TorchBackend(Path({str(zoo.path('qwen3'))!r})).load(); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_linear_equals_plain(dtype: torch.dtype) -> None:
    from weft.backends.torch.linear import Linear

    torch.manual_seed(0)
    linear = Linear([("a", 96), ("b", 33)], 64, True, dtype, torch.device("cpu"))
    for wanted in linear.wanted():
        wanted.target.copy_(torch.randn(wanted.target.shape))
    weight, bias = linear.weight, linear.bias
    linear.finish()
    for count in (1, 3, 40):
        rows = torch.randn(count, 64).to(dtype)
        expected = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(linear(rows).double(), expected, rtol=tolerance, atol=10 * tolerance)
