"""OLMoE: q and k normed over all heads together, softmax over all experts."""

from dataclasses import replace

from inference_service.models import standard_parts
from inference_service.models.attention_spec import ProjectionNormSpec
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("OlmoeForCausalLM",)
MODEL_TYPES = ("olmoe",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that an OLMoE config describes."""
    config.require("hidden_act", ("silu",), "silu")
    config.require("clip_qkv", (None,), None)
    layers = tuple(_layer(config, index) for index in range(config.integer("num_hidden_layers")))
    return standard_parts.decoder(config, layers, tied_by_default=False, default_eps=1e-5)


def _layer(config: ConfigReader, index: int) -> LayerSpec:
    prefix = f"{standard_parts.layer_prefix(index)}.self_attn"
    has_bias = config.boolean("attention_bias", default=False)
    attention = standard_parts.configured_attention(
        config,
        prefix,
        rope=read_rope(config, standard_parts.head_dim(config)),
        bias=has_bias,
        output_bias=has_bias,
    )
    norm = ProjectionNormSpec(f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
    moe = standard_parts.softmax_moe(
        config,
        f"{standard_parts.layer_prefix(index)}.mlp",
        num_experts=standard_parts.expert_count(config),
        intermediate_size=config.integer("intermediate_size"),
    )
    return standard_parts.layer(index, replace(attention, projection_norm=norm), moe)
