"""GPT-OSS written down once more, in float64 over numpy: an oracle that shares no code with the product.

It reads a checkpoint's tensors by their released names, MXFP4 ones after `unpacked`. An adapter is added to
the weights beforehand.
"""

import math
from typing import Any

import numpy as np

ALPHA = 1.702
Weights = dict[str, np.ndarray]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(weights: Weights) -> Weights:
    """The same checkpoint with every MXFP4 matrix written out, [E, in, out]; others are left as they are."""
    plain = {k: v for k, v in weights.items() if not k.endswith(("_blocks", "_scales"))}
    for name in [k.removesuffix("_blocks") for k in weights if k.endswith("_blocks")]:
        blocks, scales = weights[f"{name}_blocks"], weights[f"{name}_scales"]
        num_experts, rows, num_blocks = scales.shape
        matrix = np.zeros((num_experts, num_blocks * 32, rows))
        for e, o, b, j in np.ndindex(blocks.shape):
            unit = 2.0 ** (int(scales[e, o, b]) - 127)
            for half, code in enumerate((int(blocks[e, o, b, j]) & 15, int(blocks[e, o, b, j]) >> 4)):
                matrix[e, 32 * b + 2 * j + half, o] = unit * E2M1[code & 7] * (-1 if code & 8 else 1)
        plain[name] = matrix
    return plain


def logprobs(config: dict[str, Any], weights: Weights, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] at every position."""
    shifted = logits(config, weights, tokens)
    shifted -= shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def logits(config: dict[str, Any], weights: Weights, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] at every position."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    eps = config["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][tokens]
    for layer, kind in enumerate(config["layer_types"]):
        p = f"model.layers.{layer}"
        window = config["sliding_window"] if kind == "sliding_attention" else None
        normed = _norm(x, w[f"{p}.input_layernorm.weight"], eps)
        x = x + _attention(config, w, f"{p}.self_attn", normed, window)
        normed = _norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        x = x + np.stack([_moe(config, w, f"{p}.mlp", row) for row in normed])
    return _norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def greedy(config: dict[str, Any], weights: Weights, tokens: list[int], count: int) -> list[int]:
    """The most likely continuation, a token at a time."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(logprobs(config, weights, known)[-1].argmax()))
    return known[len(tokens) :]


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(
    config: dict[str, Any], w: Weights, name: str, x: np.ndarray, window: int | None
) -> np.ndarray:
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, k, v = (
        (x @ w[f"{name}.{part}_proj.weight"].T + w[f"{name}.{part}_proj.bias"]).reshape(len(x), count, dim)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    q, k = _rotate(config, q), _rotate(config, k)
    out = np.zeros((len(x), heads, dim))
    for head in range(heads):
        keys, values = k[:, head // (heads // kv_heads)], v[:, head // (heads // kv_heads)]
        for i in range(len(x)):
            first = 0 if window is None else max(0, i - window + 1)
            scores = keys[first : i + 1] @ q[i, head] / math.sqrt(dim)
            sink = w[f"{name}.sinks"][head]
            top = max(scores.max(), sink)
            p = np.exp(scores - top)
            out[i, head] = p @ values[first : i + 1] / (p.sum() + math.exp(sink - top))
    return out.reshape(len(x), -1) @ w[f"{name}.o_proj.weight"].T + w[f"{name}.o_proj.bias"]


def _rotate(config: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """YaRN over [T, heads, D] at positions 0, 1, ..., the ramp's ends not rounded to whole dimensions."""
    rope, dim, theta = config["rope_scaling"], x.shape[-1], config["rope_theta"]
    half, original, factor = dim // 2, rope["original_max_position_embeddings"], rope["factor"]
    low, high = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope["beta_fast"], rope["beta_slow"])
    )
    low, high = max(low, 0.0), min(high, dim - 1.0)
    attention_factor = 0.1 * math.log(factor) + 1
    out = np.empty_like(x)
    for i in range(half):
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        frequency = theta ** (-2 * i / dim)
        frequency = frequency / factor * stretched + frequency * (1 - stretched)
        for position in range(len(x)):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            a, b = x[position, :, i], x[position, :, half + i]
            out[position, :, i] = (a * cos - b * sin) * attention_factor
            out[position, :, half + i] = (b * cos + a * sin) * attention_factor
    return out


def _moe(config: dict[str, Any], w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """One token [H] through its experts; columns 0, 2, ... of gate_up are the gate's."""
    scores = w[f"{name}.router.weight"] @ x + w[f"{name}.router.bias"]
    chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[: config["num_experts_per_tok"]]
    total = sum(math.exp(scores[e] - scores[chosen[0]]) for e in chosen)
    limit, experts = config["swiglu_limit"], f"{name}.experts"
    y = np.zeros_like(x)
    for e in chosen:
        both = x @ w[f"{experts}.gate_up_proj"][e] + w[f"{experts}.gate_up_proj_bias"][e]
        inner = np.empty(len(both) // 2)
        for i in range(len(inner)):
            gate, up = min(both[2 * i], limit), min(max(both[2 * i + 1], -limit), limit)
            inner[i] = (up + 1) * gate / (1 + math.exp(-ALPHA * gate))
        out = inner @ w[f"{experts}.down_proj"][e] + w[f"{experts}.down_proj_bias"][e]
        y += math.exp(scores[e] - scores[chosen[0]]) / total * out
    return y
