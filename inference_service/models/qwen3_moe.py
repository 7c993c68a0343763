"""Qwen3-MoE: head norms on q and k, softmax routing, dense layers where the config says so."""

from inference_service.layers.rope import RopeParameters
from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import DenseMlpSpec, LayerSpec, ModelSpec, MoeSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Qwen3-MoE config describes."""
    config.require("hidden_act", ("silu",), "silu")
    rope = read_rope(config, standard_parts.head_dim(config))
    layers = tuple(_layer(config, index, rope) for index in range(config.integer("num_hidden_layers")))
    return standard_parts.decoder(config, layers, tied_by_default=False)


def _layer(config: ConfigReader, index: int, rope: RopeParameters) -> LayerSpec:
    prefix = standard_parts.layer_prefix(index)
    has_bias = config.boolean("attention_bias", default=False)
    use_window = config.boolean("use_sliding_window", default=False)
    attention = standard_parts.configured_attention(
        config,
        f"{prefix}.self_attn",
        rope=rope,
        bias=has_bias,
        output_bias=has_bias,
        head_norm=True,
        window=config.optional_integer("sliding_window") if use_window else None,
    )
    return standard_parts.layer(index, attention, _mlp(config, f"{prefix}.mlp", index))


def _mlp(config: ConfigReader, prefix: str, index: int) -> DenseMlpSpec | MoeSpec:
    num_experts = standard_parts.expert_count(config, minimum=0)
    if not standard_parts.is_sparse(config, index, num_experts):
        return standard_parts.dense_mlp(
            prefix,
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
        )
    return standard_parts.softmax_moe(
        config, prefix, num_experts=num_experts, intermediate_size=config.integer("moe_intermediate_size")
    )
