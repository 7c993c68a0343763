"""Dummy models route evenly: at random prompts and along their own greedy output, in every layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference_service.models import build
from inference_service.models import routing_rule as routing_rule_module
from inference_service.models.dummy_weights import walk_stride
from lorikeet_bench.model_shape import shape_config
from tests.support.runner import DrivenRequest, drive, make_backend

VOCAB, HIDDEN, REQUESTS, PROMPT, OUTPUT = 4096, 256, 32, 40, 20
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "layer_types": None,
    "rope_scaling": None,
    "torch_dtype": None,
}
LATENT = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "rope_theta": 1e4,
    "q_lora_rank": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 64,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss, 32 choose 4, packed": shape_config("gpt-oss-20b")
    | COMMON
    | {"intermediate_size": 64, "rope_scaling": shape_config("gpt-oss-20b")["rope_scaling"]},
    "qwen3_moe, 128 choose 8": shape_config("qwen3-30b-a3b") | COMMON | {"moe_intermediate_size": 32},
    "the same with a tied head": shape_config("qwen3-30b-a3b")
    | COMMON
    | {"moe_intermediate_size": 32, "tie_word_embeddings": True},
    "deepseek_v2, softmax, 64 choose 6": shape_config("deepseek-v2-lite") | COMMON | LATENT,
    "deepseek_v3, sigmoid in groups, 64 choose 8": DEEPSEEK_V3 | COMMON | LATENT,
    "llama4, 16 choose 1": shape_config("llama-4-scout")
    | COMMON
    | {"intermediate_size": 64, "intermediate_size_mlp": 64},
    "granitemoe, multipliers": {
        "architectures": ["GraniteMoeForCausalLM"],
        "rope_theta": 1e4,
        "intermediate_size": 32,
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.015625,
        "tie_word_embeddings": True,
    }
    | COMMON,
}


def watch(monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """Every choice of experts [T, K] of models built from now on, by layer of experts."""
    chosen: list[list[np.ndarray]] = []

    def routing_rule(*arguments: Any) -> Callable[[torch.Tensor], Any]:
        chosen.append([])
        return recorded(routing_rule_module.routing_rule(*arguments), chosen[-1])

    monkeypatch.setattr(build, "routing_rule", routing_rule)
    return chosen


def recorded(routing: Callable[..., Any], into: list[np.ndarray]) -> Callable[[torch.Tensor], Any]:
    """The same rule, taken down."""

    def route(logits: torch.Tensor, **rest: Any) -> Any:
        weights, ids = routing(logits, **rest)
        into.append(ids.numpy().copy())
        return weights, ids

    return route


def distinct_share(batches: list[np.ndarray], num_experts: int) -> float:
    """Distinct experts over what uniform routing has on average, over all batches of 32 tokens."""
    rows = [
        batch[i : i + REQUESTS] for batch in batches for i in range(0, len(batch) - REQUESTS + 1, REQUESTS)
    ]
    top_k = rows[0].shape[1]
    expected = num_experts * (1 - (1 - top_k / num_experts) ** REQUESTS)
    return float(np.mean([len(np.unique(part)) for part in rows])) / expected


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_reads_as_many_experts_as_uniform_routing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Within what so few tokens can show; 95 % is the bound of a valid bench. No expert is far busier."""
    config = {key: value for key, value in MODELS[name].items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = watch(monkeypatch)
    backend = make_backend(
        model_dir=str(tmp_path), load_format="dummy", max_context_tokens=128, num_blocks=256,
        max_running_requests=REQUESTS,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    prompts = rng.integers(0, VOCAB, (REQUESTS, PROMPT))
    driven = drive(backend, [DrivenRequest(tuple(row.tolist())) for row in prompts], num_tokens=OUTPUT)
    assert chosen
    is_tied = config.get("tie_word_embeddings", False)
    experts = config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"]
    for layer, batches in enumerate(chosen):
        prefill, decode = batches[:1], batches[1:]
        assert len(decode) == OUTPUT - 1
        for phase, part in (("prefill", prefill), ("decode", decode)):
            share = distinct_share(part, experts)
            load = np.bincount(np.concatenate(part).ravel(), minlength=experts)
            assert share > 0.96, (layer, phase, share)
            if phase == "prefill" or not is_tied:  # along a walk of two tokens there are too few to tell
                assert load.max() < 1.6 * load.mean(), (layer, phase, load)
    assert len({tuple(result.token_ids) for result in driven}) == REQUESTS
    stride = VOCAB // 2 if is_tied else walk_stride(VOCAB)
    walk = [(int(row[-1]) + stride * (i + 1)) % VOCAB for row in prompts[:1] for i in range(OUTPUT)]
    assert driven[0].token_ids == walk


@pytest.mark.parametrize("vocab_size", [1, 2, 40, 32000, 102400, 151936, 201088])
def test_a_walk_meets_every_token(vocab_size: int) -> None:
    """Before it comes back to the first."""
    stride = walk_stride(vocab_size)
    assert len({stride * i % vocab_size for i in range(vocab_size)}) == vocab_size
