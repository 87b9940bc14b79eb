"""What a native decoder is built from: one dataclass, filled from config.json by one row of a table per architecture.

All native families are the same pre-norm decoder block with switches; `FAMILIES` says which switches each one sets.
A family is listed only where the tests compare it, token for token, with its reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.backends.checkpoint import Checkpoint
from weft.backends.rope_parameters import DEFAULT_THETA, SUPPORTED_KINDS, RopeParameters, normalise_rope
from weft.core.errors import ModelLoadError

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


class NotNativeError(Exception):
    """The architecture, or a setting of it, has no native form; the adapter may still run it."""


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture-of-experts layer: `top_k` of `num_experts` experts see each token.

    `names` are the checkpoint's names of an expert's gate, up and down projection; `block` that of the whole layer.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool
    block: str
    names: tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder.

    Attributes:
        windows: per layer, how many tokens a token sees (itself included), or None for all.
        rope_layers: per layer, whether positions turn queries and keys.
        moe: per layer, its experts, or None for a dense layer.
        qk_norm: "head": norm over each head's width; "full": over all heads together; "none".
        post_norm: norms follow the sublayers (OLMo 2) rather than precede them.
        fused: the checkpoint stores qkv and gate/up as one tensor each (Phi-3).
        attention_scale: factor on q·k.
        embedding_scale, residual_scale, logit_scale: factors on embeddings, sublayer outputs and logits (Granite).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: RopeParameters
    windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]
    moe: tuple[MoEConfig | None, ...]
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"
    post_norm: bool = False
    fused: bool = False
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0


Values = Mapping[str, Any]
Switches = dict[str, Any]


def _llama(values: Values) -> Switches:
    bias = bool(values.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(values.get("mlp_bias", False))}


def _mistral(values: Values) -> Switches:
    return {"windows": _one_window(values, default=4096)}


def _ministral(values: Values) -> Switches:
    return {"windows": _windows(values, default_kind="sliding_attention")}


def _qwen2(values: Values) -> Switches:
    return {"qkv_bias": True, "windows": _switched_windows(values)}


def _qwen3(values: Values) -> Switches:
    bias = bool(values.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": _switched_windows(values)}


def _qwen3_moe(values: Values) -> Switches:
    experts = MoEConfig(
        num_experts=int(values.get("num_experts", values.get("num_local_experts", 128))),
        top_k=int(values.get("num_experts_per_tok", 8)),
        intermediate_size=int(values.get("moe_intermediate_size", 768)),
        normalise=bool(values.get("norm_topk_prob", False)),
        block="mlp",
        names=("gate_proj", "up_proj", "down_proj"),
    )
    dense, stride = values.get("mlp_only_layers") or (), int(values.get("decoder_sparse_step", 1))
    moe = tuple(
        experts if index not in dense and experts.num_experts > 0 and (index + 1) % stride == 0 else None
        for index in range(int(values["num_hidden_layers"]))
    )
    # this family's layers all share one window, unlike the dense one's
    window = _one_window(values, default=4096) if values.get("use_sliding_window") else _no_window(values)
    return {**_qwen3(values), "moe": moe, "windows": window}


def _mixtral(values: Values) -> Switches:
    experts = MoEConfig(
        num_experts=int(values.get("num_local_experts", 8)),
        top_k=int(values.get("num_experts_per_tok", 2)),
        intermediate_size=int(values["intermediate_size"]),
        normalise=True,
        block="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return {"windows": _one_window(values), "moe": (experts,) * int(values["num_hidden_layers"])}


def _phi3(values: Values) -> Switches:
    return {"fused": True, "windows": _one_window(values)}


def _granite(values: Values) -> Switches:
    return {
        **_llama(values),
        "attention_scale": float(values.get("attention_multiplier", 1.0)),
        "embedding_scale": float(values.get("embedding_multiplier", 1.0)),
        "residual_scale": float(values.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(values.get("logits_scaling", 1.0)),
    }


def _olmo2(values: Values) -> Switches:
    bias = bool(values.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "full", "post_norm": True}


def _seed_oss(values: Values) -> Switches:
    return {
        "qkv_bias": bool(values.get("attention_bias", True)),
        "o_bias": bool(values.get("attention_out_bias", False)),
        "mlp_bias": bool(values.get("mlp_bias", False)),
    }


def _smollm3(values: Values) -> Switches:
    count = int(values["num_hidden_layers"])
    interval = int(values.get("no_rope_layer_interval", 4))
    turning = values.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(count)]
    return {
        **_llama(values),
        "windows": _switched_windows(values),
        "rope_layers": tuple(bool(turns) for turns in turning),
    }


@dataclass(frozen=True, slots=True)
class Family:
    """Switches of one architecture, and what its configuration class assumes where config.json is silent."""

    switches: Callable[[Values], Switches]
    tied: bool = False
    norm_eps: float = 1e-6
    head_dim: int | None = None
    theta: float = DEFAULT_THETA
    rope_kinds: tuple[str, ...] = SUPPORTED_KINDS


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_llama),
    "MistralForCausalLM": Family(_mistral),
    "MinistralForCausalLM": Family(_ministral),
    "Qwen2ForCausalLM": Family(_qwen2),
    "Qwen3ForCausalLM": Family(_qwen3, head_dim=128),
    "Qwen3MoeForCausalLM": Family(_qwen3_moe),
    "MixtralForCausalLM": Family(_mixtral, norm_eps=1e-5, theta=1e6),
    "Phi3ForCausalLM": Family(_phi3, norm_eps=1e-5, rope_kinds=("default",)),
    "GraniteForCausalLM": Family(_granite),
    "Olmo2ForCausalLM": Family(_olmo2, norm_eps=1e-5),
    "SeedOssForCausalLM": Family(_seed_oss, head_dim=128),
    "SmolLM3ForCausalLM": Family(_smollm3, tied=True, theta=2e6),
}


def read_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The native decoder of a checkpoint. Raises NotNativeError, or ModelLoadError for a missing or bad value."""
    values = checkpoint.text
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        raise NotNativeError(f"{checkpoint.architecture} has no native decoder")
    if values.get("quantization_config") or checkpoint.config.get("quantization_config"):
        raise ModelLoadError(f"{checkpoint.path}: quantised checkpoints (quantization_config) are not supported")
    rope = normalise_rope(values, checkpoint.path / "config.json", family.theta)
    if rope is None or rope.kind not in family.rope_kinds:
        raise NotNativeError(f"rope of kind {rope.kind if rope else 'per layer type'} has no native form")
    try:
        return _build(checkpoint.architecture, family, values, rope)
    except KeyError as error:
        raise ModelLoadError(f"{checkpoint.path / 'config.json'}: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{checkpoint.path / 'config.json'}: {error}") from error


def _build(architecture: str, family: Family, values: Values, rope: RopeParameters) -> DecoderConfig:
    hidden, heads, layers = (int(values[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = int(values.get("head_dim") or family.head_dim or hidden // heads)
    activation = str(values.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise NotNativeError(f"activation {activation!r} has no native form")
    kv_heads = int(values.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    switches: Switches = {
        "windows": (None,) * layers,
        "rope_layers": (True,) * layers,
        "moe": (None,) * layers,
        "attention_scale": head_dim**-0.5,
        **family.switches(values),
    }
    for name in ("windows", "rope_layers", "moe"):
        if len(switches[name]) != layers:
            raise ValueError(f"{len(switches[name])} entries of {name} for {layers} layers")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(values["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(values["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(values.get("rms_norm_eps", family.norm_eps)),
        activation=activation,
        rope=rope,
        tied=bool(values.get("tie_word_embeddings", family.tied)),
        **switches,
    )


def _no_window(values: Values) -> tuple[int | None, ...]:
    return (None,) * int(values["num_hidden_layers"])


def _one_window(values: Values, default: int | None = None) -> tuple[int | None, ...]:
    """The same window in all layers; `default` where config.json does not name one (null means none)."""
    window = values.get("sliding_window", default)
    return (int(window) if window else None,) * int(values["num_hidden_layers"])


def _windows(values: Values, default_kind: str = "full_attention") -> tuple[int | None, ...]:
    """Windows by `layer_types` where given, else the layers from `max_window_layers` on (Qwen)."""
    count, window = int(values["num_hidden_layers"]), values.get("sliding_window", 4096)
    kinds = values.get("layer_types")
    if kinds is None:
        first = int(values.get("max_window_layers", count))
        kinds = ["sliding_attention" if index >= first else default_kind for index in range(count)]
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise NotNativeError(f"layer type {unknown[0]!r} has no native form")
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds)


def _switched_windows(values: Values) -> tuple[int | None, ...]:
    """As `_windows`, in the families where `use_sliding_window` must be on for any of them to count."""
    return _windows(values) if values.get("use_sliding_window") else _no_window(values)
