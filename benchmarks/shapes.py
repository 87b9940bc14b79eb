"""Random-weight checkpoints of known shapes, written where benchmarks need them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

DEMO = Path(__file__).parent.parent / "src" / "weft" / "assets" / "demo"

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "eos_token_id": 151645,
}


def _tensors(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        shapes |= {
            f"{block}input_layernorm.weight": (hidden,),
            f"{block}post_attention_layernorm.weight": (hidden,),
            f"{block}self_attn.q_proj.weight": (queries, hidden),
            f"{block}self_attn.k_proj.weight": (keys, hidden),
            f"{block}self_attn.v_proj.weight": (keys, hidden),
            f"{block}self_attn.o_proj.weight": (hidden, queries),
            f"{block}self_attn.q_norm.weight": (head,),
            f"{block}self_attn.k_norm.weight": (head,),
            f"{block}mlp.gate_proj.weight": (ffn, hidden),
            f"{block}mlp.up_proj.weight": (ffn, hidden),
            f"{block}mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def _bfloat16(values: np.ndarray) -> bytes:
    """The upper halves of float32 numbers, which is what bfloat16 is."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_qwen3_06b(folder: Path, seed: int = 0) -> Path:
    """A checkpoint of Qwen3-0.6B's shape with the demo model's tokenizer; made once, 1.2 GB."""
    weights = folder / "model.safetensors"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shapes = _tensors(QWEN3_06B)
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header).encode()
    with weights.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, shape in shapes.items():
            values = np.ones(shape) if "norm" in name else rng.standard_normal(shape, dtype=np.float32) * 0.02
            file.write(_bfloat16(values))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder / name)
    (folder / "config.json").write_text(json.dumps(QWEN3_06B, indent=2))
    return folder


def write_qwen3_06b_gguf(folder: Path, kind: str, seed: int = 0) -> Path:
    """The same shape as a GGUF file with random weights: "Q8_0" or "Q4_K_M", quantised by llama.cpp from F16.

    Tokens beyond the demo model's are named `[unused N]`. Made once; 0.6 or 0.4 GB.
    """
    import gguf
    from gguf.constants import GGMLQuantizationType, LlamaFileType, TokenType

    from tools.demo_model.export_gguf import add_metadata, gguf_name

    out = folder / f"qwen3-0.6b-{kind}.gguf"
    if out.exists():
        return out
    source = folder / "qwen3-0.6b-F16.gguf"
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(source.with_suffix(".part"), "qwen3")
        add_metadata(writer, QWEN3_06B, LlamaFileType.MOSTLY_F16)
        tokenizer = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
        special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        kinds = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(tokens))]
        missing = QWEN3_06B["vocab_size"] - len(tokens)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens + [f"[unused {i}]" for i in range(missing)])
        writer.add_token_types(kinds + [TokenType.UNUSED] * missing)
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
        writer.add_eos_token_id(QWEN3_06B["eos_token_id"])
        writer.add_add_bos_token(False)
        writer.add_chat_template((DEMO / "chat_template.jinja").read_text(encoding="utf-8"))
        rng = np.random.default_rng(seed)
        for name, shape in _tensors(QWEN3_06B).items():
            if len(shape) == 1:
                writer.add_tensor(gguf_name(name), np.ones(shape, dtype=np.float32))
            else:
                values = (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(np.float16)
                writer.add_tensor(gguf_name(name), values, raw_dtype=GGMLQuantizationType.F16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source.with_suffix(".part").rename(source)
    _quantise(source, out, kind)
    return out


def _quantise(source: Path, out: Path, kind: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"Q8_0": 7, "Q4_K_M": 15}[kind]
    part = out.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantise {source}")
    part.rename(out)
