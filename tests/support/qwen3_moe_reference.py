"""A Qwen3-MoE's logits in plain float64, a token at a time, its projections given as functions."""

import math
from collections.abc import Callable
from typing import Any

import torch

Project = Callable[[str, torch.Tensor], torch.Tensor]
"""The rows [T, in] through the module at a path."""


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], project: Project, tokens: list[int]
) -> torch.Tensor:
    """[T, V] of one sequence; `weights` by module, in float64."""
    x = weights["model.embed_tokens"][tokens]
    eps = config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        normed = _norm(x, weights[f"{p}.input_layernorm"], eps)
        x = x + _attention(config, weights, project, f"{p}.self_attn", normed)
        normed = _norm(x, weights[f"{p}.post_attention_layernorm"], eps)
        x = x + _moe(config, project, f"{p}.mlp", normed)
    return _norm(x, weights["model.norm"], eps) @ weights["lm_head"].T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def _attention(
    config: dict[str, Any], weights: dict[str, torch.Tensor], project: Project, path: str, x: torch.Tensor
) -> torch.Tensor:
    count, dim = len(x), config["head_dim"]
    q, k, v = (project(f"{path}.{n}_proj", x).view(count, -1, dim) for n in "qkv")
    q = _rotate(_norm(q, weights[f"{path}.q_norm"], config["rms_norm_eps"]), config["rope_theta"])
    k = _rotate(_norm(k, weights[f"{path}.k_norm"], config["rms_norm_eps"]), config["rope_theta"])
    out = torch.empty_like(q)
    per_head = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // per_head].T / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        out[:, head] = torch.softmax(scores, dim=-1) @ v[:, head // per_head]
    return project(f"{path}.o_proj", out.flatten(1))


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _moe(config: dict[str, Any], project: Project, path: str, x: torch.Tensor) -> torch.Tensor:
    scores = torch.softmax(project(f"{path}.gate", x), dim=-1)
    chosen, experts = scores.topk(config["num_experts_per_tok"], dim=-1)
    chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, expert in zip(chosen[t], experts[t].tolist(), strict=True):
            one = f"{path}.experts.{expert}"
            gate, up = (project(f"{one}.{n}_proj", x[t : t + 1]) for n in ("gate", "up"))
            out[t] += weight * project(f"{one}.down_proj", gate * torch.sigmoid(gate) * up)[0]
    return out
