"""GraniteMoe: four multipliers, experts stored as two stacked matrices, softmax over the chosen."""

from dataclasses import replace

from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import (
    ExpertsSpec,
    FusedWeights,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    Multipliers,
    SoftmaxRouting,
)

ARCHITECTURES = ("GraniteMoeForCausalLM",)
MODEL_TYPES = ("granitemoe",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a GraniteMoe config describes."""
    config.require("hidden_act", ("silu",), "silu")
    layers = tuple(_layer(config, index) for index in range(config.integer("num_hidden_layers")))
    multipliers = Multipliers(
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        logits=1.0 / config.number("logits_scaling", 1.0),
    )
    return standard_parts.decoder(config, layers, tied_by_default=False, multipliers=multipliers)


def _layer(config: ConfigReader, index: int) -> LayerSpec:
    prefix = standard_parts.layer_prefix(index)
    has_bias = config.boolean("attention_bias", default=False)
    attention = standard_parts.configured_attention(
        config,
        f"{prefix}.self_attn",
        rope=read_rope(config, standard_parts.head_dim(config)),
        bias=has_bias,
        output_bias=has_bias,
        scale=config.number("attention_multiplier", 1.0),
    )
    return standard_parts.layer(index, attention, _moe(config, f"{prefix}.block_sparse_moe"))


def _moe(config: ConfigReader, prefix: str) -> MoeSpec:
    hidden_size, num_experts = config.integer("hidden_size"), standard_parts.expert_count(config)
    return MoeSpec(
        router=standard_parts.single(
            "router", f"{prefix}.router.layer", hidden_size, num_experts, aliases=(f"{prefix}.router",)
        ),
        routing=SoftmaxRouting(standard_parts.experts_per_token(config, num_experts), renormalize=True),
        experts=_experts(config, prefix, num_experts, hidden_size),
    )


def _experts(config: ConfigReader, prefix: str, num_experts: int, hidden_size: int) -> ExpertsSpec:
    """Named as transformers 5 does, which adapters follow; the checkpoint has older names."""
    experts = standard_parts.experts(
        f"{prefix}.experts",
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
    )
    return replace(
        experts,
        gate_up=replace(experts.gate_up, storage=FusedWeights(f"{prefix}.input_linear.weight")),
        down=replace(experts.down, storage=FusedWeights(f"{prefix}.output_linear.weight")),
    )
