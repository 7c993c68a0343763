"""Qwen3: dense layers, head norms on q and k, a window in the upper layers where the config uses one."""

from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import LayerSpec, ModelSpec
from inference_service.models.window_config import layer_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Qwen3 config describes."""
    config.require("hidden_act", ("silu",), "silu")
    num_full = config.integer("max_window_layers", 28, minimum=0)
    windows = layer_windows(config, lambda index: index >= num_full)
    layers = tuple(_layer(config, index, window) for index, window in enumerate(windows))
    return standard_parts.decoder(config, layers, tied_by_default=False)


def _layer(config: ConfigReader, index: int, window: int | None) -> LayerSpec:
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
            head_norm=True,
            window=window,
        ),
        standard_parts.dense_mlp(
            f"{prefix}.mlp",
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
        ),
    )
