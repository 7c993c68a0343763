"""The decoder against a plain numpy transcription of the model, for what the golden fixtures leave out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_model import CONFIG, make_weights, write_model

TOKENS = [3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19, 20, 22]


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMS norm."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last dimension."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    """Value times its sigmoid."""
    return x / (1 + np.exp(-x))


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """[T, heads, D], positions 0..T-1."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1
    )


def naive_logprobs(config: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] at every position, float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    window = config["sliding_window"] if config.get("use_sliding_window") else len(tokens)
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
    hidden = (distance < 0) | (distance >= window)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def mlp(x: np.ndarray, name: str) -> np.ndarray:
        inner = silu(project(x, f"{name}.gate_proj")) * project(x, f"{name}.up_proj")
        return project(inner, f"{name}.down_proj")

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        h = norm(x, w[f"{p}.input_layernorm.weight"])
        q, k, v = (
            project(h, f"{p}.self_attn.{n}_proj").reshape(len(tokens), -1, dim) for n in ("q", "k", "v")
        )
        q = rotate(norm(q, w[f"{p}.self_attn.q_norm.weight"]), config["rope_theta"])
        k = rotate(norm(k, w[f"{p}.self_attn.k_norm.weight"]), config["rope_theta"])
        out = np.empty_like(q)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = np.where(hidden, -np.inf, q[:, head] @ k[:, group].T / np.sqrt(dim))
            out[:, head] = softmax(scores) @ v[:, group]
        x = x + project(out.reshape(len(tokens), -1), f"{p}.self_attn.o_proj")
        h = norm(x, w[f"{p}.post_attention_layernorm.weight"])
        if f"{p}.mlp.gate.weight" not in w:
            x = x + mlp(h, f"{p}.mlp")
            continue
        scores = softmax(project(h, f"{p}.mlp.gate"))
        for t in range(len(tokens)):
            chosen = np.argsort(-scores[t])[: config["num_experts_per_tok"]]
            total = scores[t, chosen].sum() if config["norm_topk_prob"] else 1.0
            for expert in chosen:
                x[t] += scores[t, expert] / total * mlp(h[t], f"{p}.mlp.experts.{expert}")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.log(softmax(norm(x, w["model.norm.weight"]) @ head.T))


def served_logprobs(path: Path, tokens: list[int], chunk: int) -> np.ndarray:
    """The same through the runner."""
    backend = make_backend(model_dir=str(path), max_context_tokens=128)
    vocab = backend.info.vocab_size
    sampling = type(GREEDY)(max_tokens=1, temperature=0.0, logprobs=vocab, prompt_logprobs=vocab)
    result = drive(backend, [DrivenRequest(tokens, sampling=sampling)], num_tokens=1, chunk=chunk)[0]
    rows = np.empty((len(tokens), vocab))
    for row, entry in zip(rows, [*result.prompt_logprobs, result.logprobs[0]], strict=True):
        row[list(entry.top_ids)] = entry.top_logprobs
    return rows


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2, "num_hidden_layers": 3},
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 3},
        {"tie_word_embeddings": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 3},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [3, 100])
def test_against_numpy(tmp_path: Path, fields: dict[str, Any], chunk: int) -> None:
    """Each field that changes the model, prompt whole and in chunks."""
    config = CONFIG | fields
    weights = make_weights(config)
    served = served_logprobs(write_model(tmp_path, weights, **fields), TOKENS, chunk)
    assert np.abs(served - naive_logprobs(config, weights, TOKENS)).max() < 2e-4
