"""Tiny random models of every family, written as checkpoints by `transformers`, and what that library computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,  # so large that the best two logits lie well apart
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

Maker = Callable[[], Any]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}

NATIVE: dict[str, Maker] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama-biases": lambda: transformers.LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: transformers.LlamaConfig(**{**GROUPED, "tie_word_embeddings": True}),
    "llama-multihead": lambda: transformers.LlamaConfig(**COMMON, num_key_value_heads=4),
    "llama-gelu": lambda: transformers.LlamaConfig(**GROUPED, hidden_act="gelu"),
    "rope-linear": lambda: _llama_with({"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}),
    "rope-llama3": lambda: _llama_with(LLAMA3),
    "rope-yarn": lambda: _llama_with(YARN),
    "rope-yarn-mscale": lambda: _llama_with({**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}),
    "rope-yarn-given": lambda: _llama_with({**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2}),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=9),
    "ministral": lambda: transformers.MinistralConfig(
        **HEADS, sliding_window=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS),
    "qwen3-bias-window": lambda: transformers.Qwen3Config(
        **HEADS, attention_bias=True, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=6, norm_topk_prob=True),
    "qwen3-moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **HEADS, **EXPERTS, num_experts=6, decoder_sparse_step=2, mlp_only_layers=[0]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_experts_per_tok=2, num_local_experts=4),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, sliding_window=9),
    "phi3-partial": lambda: transformers.Phi3Config(**GROUPED, partial_rotary_factor=0.5),
    "granite": lambda: transformers.GraniteConfig(
        **GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0, attention_multiplier=0.3
    ),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "seed-oss": lambda: transformers.SeedOssConfig(**HEADS, attention_out_bias=True),
    "smollm3": lambda: transformers.SmolLM3Config(**GROUPED, no_rope_layer_interval=2, tie_word_embeddings=False),
}

UNTIED = {"tie_word_embeddings": False}
ADAPTED: dict[str, Maker] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=512, initializer_range=0.3, eos_token_id=2
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, init_std=0.3,
        max_position_embeddings=512, word_embed_proj_dim=64,
    ),
    "phi": lambda: transformers.PhiConfig(**COMMON),
    "gemma2": lambda: transformers.Gemma2Config(**HEADS, **UNTIED, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**HEADS, **UNTIED, sliding_window=8, query_pre_attn_scalar=16),
    "cohere2": lambda: transformers.Cohere2Config(**COMMON, num_key_value_heads=4, sliding_window=8),
    "starcoder2": lambda: transformers.Starcoder2Config(**GROUPED, sliding_window=8),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **GROUPED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=64
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **COMMON, **EXPERTS, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, first_k_dense_replace=1,
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[Maker, str]] = {
    "falcon": (
        lambda: transformers.FalconConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "FalconForCausalLM is not supported: its attention does not go through",
    ),
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4),
        "BloomForCausalLM is not supported: its forward pass takes no position_ids",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2),
        "MambaForCausalLM is not supported",
    ),
    "t5": (
        lambda: transformers.T5Config(vocab_size=VOCAB, d_model=64, num_layers=2, num_heads=4, d_kv=16, d_ff=64),
        "T5ForConditionalGeneration is not supported",
    ),
}


def _llama_with(rope: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(**GROUPED, rope_parameters=rope)


def build(config: Any, seed: int = 0) -> Any:
    """A model with random weights; norms too are random, since all-one norms hide mistakes."""
    torch.manual_seed(seed)
    kind = transformers.T5ForConditionalGeneration if config.model_type == "t5" else None
    model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "gate.weight" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by the library's own generation; end tokens do not end it."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = result[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Float32 logits [len(tokens), vocabulary] of one forward pass without a cache."""
    result: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return result


class Zoo:
    """Makes each checkpoint once per test session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = cache(self._model)
        self.path = cache(self._path)

    def _maker(self, name: str) -> Maker:
        return REFUSED[name][0] if name in REFUSED else {**NATIVE, **ADAPTED}[name]

    def _model(self, name: str) -> Any:
        return build(self._maker(name)())

    def _path(self, name: str) -> Path:
        path = self._folder / name
        # some in several shards, as large checkpoints come
        shards = {"max_shard_size": "60KB"} if len(name) % 2 else {}
        self.model(name).save_pretrained(path, **shards)
        return path
