"""Tiny GPT-OSS directories with random weights, plain or packed, for tests that choose the sizes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "vocab_size": 48,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": None,
}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Weights = dict[str, np.ndarray]


def make_weights(config: dict[str, Any] = CONFIG, seed: int = 0) -> Weights:
    """Every tensor of the bfloat16 checkpoint by its released name, in float32.

    Experts are large enough that gate and up cross the activation's limit now and then.
    """
    rng = np.random.default_rng(seed)
    hidden, inner, num_experts = (
        config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def norm() -> np.ndarray:
        return 1 + normal(hidden, scale=0.1)

    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": norm(),
        "lm_head.weight": normal(config["vocab_size"], hidden, scale=hidden**-0.5),
    }
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        weights[f"{p}.input_layernorm.weight"] = norm()
        weights[f"{p}.post_attention_layernorm.weight"] = norm()
        for name, rows, columns in (
            ("self_attn.q_proj", heads * dim, hidden),
            ("self_attn.k_proj", kv_heads * dim, hidden),
            ("self_attn.v_proj", kv_heads * dim, hidden),
            ("self_attn.o_proj", hidden, heads * dim),
            ("mlp.router", num_experts, hidden),
        ):
            weights[f"{p}.{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            weights[f"{p}.{name}.bias"] = normal(rows, scale=0.3)
        weights[f"{p}.self_attn.sinks"] = normal(heads)
        experts = f"{p}.mlp.experts"
        weights[f"{experts}.gate_up_proj"] = normal(num_experts, hidden, 2 * inner, scale=4 * hidden**-0.5)
        weights[f"{experts}.gate_up_proj_bias"] = normal(num_experts, 2 * inner)
        weights[f"{experts}.down_proj"] = normal(num_experts, inner, hidden, scale=0.2 * inner**-0.5)
        weights[f"{experts}.down_proj_bias"] = normal(num_experts, hidden, scale=0.1)
    return weights


def pack_experts(weights: Weights, seed: int = 0) -> Weights:
    """The same checkpoint with random MXFP4 experts; sizes must be multiples of 32."""
    rng = np.random.default_rng(seed)
    packed = dict(weights)
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = packed.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        packed[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        packed[f"{name}_scales"] = rng.integers(118, 125, shape, dtype=np.uint8)
    return packed


def write_gpt_oss(path: Path, weights: Weights | None = None, **fields: object) -> Path:
    """Write a model directory; `fields` change the config (None removes a field)."""
    config = {k: v for k, v in (CONFIG | fields).items() if v is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(make_weights(CONFIG | fields) if weights is None else weights, path / "model.safetensors")
    return path
