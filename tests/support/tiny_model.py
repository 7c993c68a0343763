"""Tiny Qwen3-MoE directories with random weights, which a test may change before they are written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, by its released name."""
    rng = np.random.default_rng(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def mlp(prefix: str, size: int) -> dict[str, np.ndarray]:
        return {
            f"{prefix}.gate_proj.weight": matrix(size, hidden),
            f"{prefix}.up_proj.weight": matrix(size, hidden),
            f"{prefix}.down_proj.weight": matrix(hidden, size),
        }

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 5,
        "model.norm.weight": vector(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        weights[f"{p}.input_layernorm.weight"] = vector(hidden)
        weights[f"{p}.post_attention_layernorm.weight"] = vector(hidden)
        for name, width in widths.items():
            weights[f"{p}.self_attn.{name}_proj.weight"] = matrix(width, hidden)
        weights[f"{p}.self_attn.o_proj.weight"] = matrix(hidden, widths["q"])
        if config["attention_bias"]:
            for name, width in {**widths, "o": hidden}.items():
                weights[f"{p}.self_attn.{name}_proj.bias"] = vector(width)
        for name in ("q", "k"):
            weights[f"{p}.self_attn.{name}_norm.weight"] = vector(head_dim)
        is_sparse = (layer + 1) % config["decoder_sparse_step"] == 0 and layer not in config[
            "mlp_only_layers"
        ]
        if not is_sparse:
            weights |= mlp(f"{p}.mlp", config["intermediate_size"])
            continue
        weights[f"{p}.mlp.gate.weight"] = matrix(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            weights |= mlp(f"{p}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return weights


def write_model(
    path: Path,
    weights: dict[str, np.ndarray] | None = None,
    *,
    num_shards: int = 1,
    **fields: object,
) -> Path:
    """Write a model directory; `fields` change the config (None removes a field)."""
    config = {k: v for k, v in (CONFIG | fields).items() if v is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weights = make_weights(CONFIG | fields) if weights is None else weights
    if num_shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: weights[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path
