"""The sizes of released models: what a family counts from their configs is what their makers publish."""

from typing import Any

import pytest
import torch

from inference_service.models import parameter_bytes
from inference_service.models.config import ConfigReader
from inference_service.models.registry import declare_model


def config(architecture: str, **fields: Any) -> dict[str, Any]:
    """The fields of a config that sizes depend on."""
    common = {"architectures": [architecture], "max_position_embeddings": 4096, "rope_theta": 1e4}
    return common | fields


def grouped(hidden: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    """Sizes under their usual names."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def latent(query_rank: int | None) -> dict[str, int | None]:
    """DeepSeek's attention; all its models share these sizes."""
    return {
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


RELEASED = {
    "Mixtral-8x7B": (
        46.7,
        config(
            "MixtralForCausalLM",
            **grouped(4096, 32, 32, 8, 32000),
            intermediate_size=14336,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "DeepSeek-V3": (
        671.0,
        config(
            "DeepseekV3ForCausalLM",
            **grouped(7168, 61, 128, 128, 129280),
            **latent(1536),
            intermediate_size=18432,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            num_experts_per_tok=8,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=1,
        ),
    ),
    "DeepSeek-V2": (
        235.7,
        config(
            "DeepseekV2ForCausalLM",
            **grouped(5120, 60, 128, 128, 102400),
            **latent(1536),
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            n_shared_experts=2,
            first_k_dense_replace=1,
            n_group=8,
            topk_group=3,
            topk_method="group_limited_greedy",
            num_experts_per_tok=6,
        ),
    ),
    "DeepSeek-V2-Lite": (
        15.7,
        config(
            "DeepseekV2ForCausalLM",
            **grouped(2048, 27, 16, 16, 102400),
            **latent(None),
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            first_k_dense_replace=1,
            num_experts_per_tok=6,
        ),
    ),
    "Llama-4-Scout, its text model": (
        107.8,
        config(
            "Llama4ForCausalLM",
            **grouped(5120, 48, 40, 8, 202048),
            head_dim=128,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_local_experts=16,
            num_experts_per_tok=1,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        14.3,
        config(
            "Qwen2MoeForCausalLM",
            **grouped(2048, 24, 16, 16, 151936),
            intermediate_size=5632,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
    ),
    "OLMoE-1B-7B": (
        6.9,
        config(
            "OlmoeForCausalLM",
            **grouped(2048, 16, 16, 16, 50304),
            intermediate_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
        ),
    ),
    "Granite-3.0-1B-A400M": (
        1.3,
        config(
            "GraniteMoeForCausalLM",
            **grouped(1024, 24, 16, 8, 49155),
            intermediate_size=512,
            num_local_experts=32,
            num_experts_per_tok=8,
            tie_word_embeddings=True,
        ),
    ),
    "Llama-3.1-8B": (
        8.0,
        config("LlamaForCausalLM", **grouped(4096, 32, 32, 8, 128256), intermediate_size=14336),
    ),
    "Qwen3-8B": (
        8.2,
        config("Qwen3ForCausalLM", **grouped(4096, 36, 32, 8, 151936), head_dim=128, intermediate_size=12288),
    ),
}


@pytest.mark.parametrize("model", RELEASED)
def test_parameters_in_billions(model: str) -> None:
    """Rounded as published."""
    published, fields = RELEASED[model]
    _, spec = declare_model(ConfigReader("config.json", fields))
    assert round(parameter_bytes(spec, torch.bfloat16) / 2 / 1e9, 1) == published
