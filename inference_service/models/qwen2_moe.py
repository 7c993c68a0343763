"""Qwen2-MoE: biases on q, k and v, and a shared expert that a sigmoid weighs."""

from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import (
    DenseMlpSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    SharedExpertSpec,
)
from inference_service.models.window_config import layer_windows

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
MODEL_TYPES = ("qwen2_moe",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Qwen2-MoE config describes."""
    config.require("hidden_act", ("silu",), "silu")
    num_windowed = config.integer("max_window_layers", 28, minimum=0)
    windows = layer_windows(config, lambda index: index % 2 == 0 and index < num_windowed)
    layers = tuple(_layer(config, index, window) for index, window in enumerate(windows))
    return standard_parts.decoder(config, layers, tied_by_default=False)


def _layer(config: ConfigReader, index: int, window: int | None) -> LayerSpec:
    prefix = standard_parts.layer_prefix(index)
    attention = standard_parts.configured_attention(
        config,
        f"{prefix}.self_attn",
        rope=read_rope(config, standard_parts.head_dim(config)),
        bias=config.boolean("qkv_bias", default=True),
        output_bias=False,
        window=window,
    )
    return standard_parts.layer(index, attention, _mlp(config, f"{prefix}.mlp", index))


def _mlp(config: ConfigReader, prefix: str, index: int) -> DenseMlpSpec | MoeSpec:
    hidden_size, num_experts = config.integer("hidden_size"), standard_parts.expert_count(config, minimum=0)
    if not standard_parts.is_sparse(config, index, num_experts):
        return standard_parts.dense_mlp(
            prefix, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size")
        )
    shared = SharedExpertSpec(
        mlp=standard_parts.dense_mlp(
            f"{prefix}.shared_expert",
            hidden_size=hidden_size,
            intermediate_size=config.integer("shared_expert_intermediate_size"),
            key="shared",
        ),
        gate=standard_parts.single("shared_gate", f"{prefix}.shared_expert_gate", hidden_size, 1),
    )
    return standard_parts.softmax_moe(
        config,
        prefix,
        num_experts=num_experts,
        intermediate_size=config.integer("moe_intermediate_size"),
        shared=shared,
    )
