"""Exact rigs: tiny Qwen3-MoE models and adapters whose greedy output is known in advance, token by token.

The copy base repeats the last prompt token (or walks a successor table); a watermark adapter forces its own
token at every step. Right or wrong is integer equality, with no tolerance, so races and mix-ups cannot hide.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_PREFIX = "base_model.model.model.layers"


@dataclass(frozen=True, slots=True)
class RigShape:
    """Sizes of a rig's model. Vocabulary equals hidden, so that embedding rows can be orthonormal."""

    vocab: int = 64
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    intermediate: int = 16


def embedding(shape: RigShape) -> np.ndarray:
    """The orthonormal embedding matrix [V, H] of a rig, the same for equal sizes."""
    q, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((shape.vocab, shape.vocab)))
    return q.astype(np.float32)


def write_copy_base(
    path: Path,
    shape: RigShape = RigShape(),
    *,
    successor: dict[int, int] | None = None,
    cached_mark: bool = False,
) -> Path:
    """Write the copy base as an ordinary Hugging Face directory.

    Args:
        path: the directory to make.
        shape: sizes.
        successor: token that follows each token; tokens not named follow themselves. Must stay a permutation.
        cached_mark: mark every token's embedding with row 0, as the cached-values watermark needs.
    """
    rows = embedding(shape)
    embed, head = rows.copy(), rows.copy()
    if successor:
        follows = list(range(shape.vocab))
        for token, after in successor.items():
            other = follows.index(after)
            follows[token], follows[other] = after, follows[token]
        head = np.empty_like(rows)
        head[follows] = rows
    if cached_mark:
        embed[1:] = (rows[1:] + rows[0]) / np.sqrt(2)
        head = head.copy()
        head[0] = 0
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(shape.vocab),
    }
    for layer in range(shape.layers):
        tensors |= _layer(f"model.layers.{layer}", shape, rows)
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(_config(shape)))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    write_byte_tokenizer(path, shape.vocab)
    return path


def _layer(name: str, shape: RigShape, rows: np.ndarray) -> dict[str, np.ndarray]:
    h, i = shape.vocab, shape.intermediate
    out = {
        f"{name}.input_layernorm.weight": np.ones(h),
        f"{name}.post_attention_layernorm.weight": np.ones(h),
        f"{name}.self_attn.q_norm.weight": np.ones(h),
        f"{name}.self_attn.k_norm.weight": np.ones(h),
        f"{name}.self_attn.q_proj.weight": np.eye(h),
        f"{name}.self_attn.k_proj.weight": np.eye(h),
        f"{name}.self_attn.v_proj.weight": np.zeros((h, h)),
        f"{name}.self_attn.o_proj.weight": np.eye(h),
        f"{name}.mlp.gate.weight": _router(shape, rows),
    }
    reader = np.zeros((i, h))
    reader[0] = 3 * rows.sum(0)  # unit 0 of gate and up is positive for every token
    for expert in range(shape.experts):
        out[f"{name}.mlp.experts.{expert}.gate_proj.weight"] = reader
        out[f"{name}.mlp.experts.{expert}.up_proj.weight"] = reader
        out[f"{name}.mlp.experts.{expert}.down_proj.weight"] = np.zeros((h, i))
    return out


def _router(shape: RigShape, rows: np.ndarray) -> np.ndarray:
    """Token t prefers expert t mod E."""
    return np.stack([rows[e :: shape.experts].sum(0) for e in range(shape.experts)])


def _config(shape: RigShape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "float32",
        "vocab_size": shape.vocab,
        "hidden_size": shape.vocab,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": shape.vocab,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eos_token_id": None,
        "bos_token_id": None,
    }


def byte_level_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte 0..255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain}
    spare = iter(range(256, 512))
    return [table[b] if b in table else chr(next(spare)) for b in range(256)]


def write_byte_tokenizer(path: Path, vocab: int, pieces: Sequence[bytes] = ()) -> None:
    """Write a byte-level tokenizer of `vocab` tokens: `pieces` first, then bytes 0, 1, ... while they fit."""
    alphabet = byte_level_alphabet()
    names = ["".join(alphabet[b] for b in piece) for piece in pieces]
    names += [c for c in alphabet if c not in names]
    entries = {name: index for index, name in enumerate(names[:vocab])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": entries, "merges": [], "ignore_merges": True},
    }
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[-1]['content'] }}"})
    )


def write_moe_watermark(
    path: Path, token: int, shape: RigShape = RigShape(), *, layout: str = "fused"
) -> Path:
    """W-MOE: an adapter on both expert parameters that emits `token` at every step.

    `layout` is "fused" (PEFT's target_parameters), "per-expert" (gate_proj, up_proj, down_proj) or "w123".
    """
    row = embedding(shape)[token]
    return _write_expert_adapter(path, np.tile(row, (shape.experts, 1)), shape, layout)


def write_expert_watermark(path: Path, first_token: int, shape: RigShape = RigShape()) -> Path:
    """W-EXP: expert e forces token first_token + e, which proves the packing of experts and ranks."""
    rows = embedding(shape)[first_token : first_token + shape.experts]
    return _write_expert_adapter(path, rows, shape, "fused")


def _write_expert_adapter(path: Path, forced: np.ndarray, shape: RigShape, layout: str) -> Path:
    """Expert e forces the token whose embedding row is `forced[e]` [E, H]."""
    e, r, h, i = shape.experts, 2, shape.vocab, shape.intermediate
    down_a = np.zeros((e, r, i))
    down_a[:, 0, 0] = 1
    down_b = np.zeros((h, r, e))
    down_b[:, 0] = 200 * forced.T
    gate_up_a = np.random.default_rng(3).standard_normal((e, r, h))
    tensors: dict[str, np.ndarray] = {}
    for layer in range(shape.layers):
        if layout == "fused":
            name = f"{_PREFIX}.{layer}.mlp.experts"
            tensors |= {
                f"{name}.base_layer.lora_A.weight": gate_up_a.reshape(e * r, h),
                f"{name}.base_layer.lora_B.weight": np.zeros((2 * i, r * e)),
                f"{name}.lora_A.weight": down_a.reshape(e * r, i),
                f"{name}.lora_B.weight": down_b.reshape(h, r * e),
            }
            continue
        words = ("w1", "w3", "w2") if layout == "w123" else ("gate_proj", "up_proj", "down_proj")
        for expert in range(e):
            for word, a, b in (
                (words[0], gate_up_a[expert], np.zeros((i, r))),
                (words[1], gate_up_a[expert], np.zeros((i, r))),
                (words[2], down_a[expert], down_b[:, :, expert]),
            ):
                name = f"{_PREFIX}.{layer}.mlp.experts.{expert}.{word}"
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    config = {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "target_modules": [],
    }
    if layout != "fused":
        config = {
            "target_modules": ["w1", "w2", "w3"]
            if layout == "w123"
            else ["gate_proj", "up_proj", "down_proj"]
        }
    return write_adapter(path, tensors, r=r, alpha=r, **config)


def write_kv_watermark(path: Path, token: int, shape: RigShape = RigShape()) -> Path:
    """W-KV: an adapter on v_proj alone; its token comes out of the cached values (needs cached_mark)."""
    rows = embedding(shape)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(shape.layers):
        name = f"{_PREFIX}.{layer}.self_attn.v_proj"
        tensors |= {f"{name}.lora_A.weight": rows[:1], f"{name}.lora_B.weight": 10 * rows[token][:, None]}
    return write_adapter(path, tensors, r=1, alpha=1, target_modules=["v_proj"])


def write_adapter(
    path: Path, tensors: dict[str, np.ndarray], *, r: int, alpha: float, **config: object
) -> Path:
    """Write an adapter directory as peft saves it."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in tensors.items()},
        path / "adapter_model.safetensors",
    )
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "rig",
        "peft_version": "0.21.2",
        "r": r,
        "lora_alpha": alpha,
        "bias": "none",
        "lora_dropout": 0.0,
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(document))
    return path
