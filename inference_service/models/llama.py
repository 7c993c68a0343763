"""Llama: dense layers, the scaled rotation of 3.x, biases where the config says so."""

from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Llama config describes."""
    config.require("hidden_act", ("silu",), "silu")
    layers = tuple(_layer(config, index) for index in range(config.integer("num_hidden_layers")))
    return standard_parts.decoder(config, layers, tied_by_default=False)


def _layer(config: ConfigReader, index: int) -> LayerSpec:
    prefix = standard_parts.layer_prefix(index)
    has_bias = config.boolean("attention_bias", default=False)
    return standard_parts.layer(
        index,
        standard_parts.configured_attention(
            config,
            f"{prefix}.self_attn",
            rope=read_rope(config, standard_parts.head_dim(config)),
            bias=has_bias,
            output_bias=has_bias,
        ),
        standard_parts.dense_mlp(
            f"{prefix}.mlp",
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            bias=config.boolean("mlp_bias", default=False),
        ),
    )
