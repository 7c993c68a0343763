"""Mixtral: experts w1, w3 and w2, softmax over the chosen, a window where the config has one."""

from inference_service.layers.rope import RopeParameters
from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import LayerSpec, ModelSpec, MoeSpec, SoftmaxRouting

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Mixtral config describes."""
    config.require("hidden_act", ("silu",), "silu")
    rope = read_rope(config, standard_parts.head_dim(config), default_theta=1e6)
    num_layers = config.integer("num_hidden_layers")
    layers = tuple(_layer(config, index, rope) for index in range(num_layers))
    return standard_parts.decoder(config, layers, tied_by_default=False, default_eps=1e-5)


def _layer(config: ConfigReader, index: int, rope: RopeParameters) -> LayerSpec:
    prefix = standard_parts.layer_prefix(index)
    attention = standard_parts.configured_attention(
        config,
        f"{prefix}.self_attn",
        rope=rope,
        bias=False,
        output_bias=False,
        window=config.optional_integer("sliding_window"),
    )
    return standard_parts.layer(index, attention, _moe(config, prefix))


def _moe(config: ConfigReader, prefix: str) -> MoeSpec:
    """Stored under `block_sparse_moe`, which transformers 5 and the adapters trained with it call `mlp`."""
    stored, module = f"{prefix}.block_sparse_moe", f"{prefix}.mlp"
    hidden_size, num_experts = config.integer("hidden_size"), standard_parts.expert_count(config)
    return MoeSpec(
        router=standard_parts.single(
            "router", f"{stored}.gate", hidden_size, num_experts, aliases=(f"{module}.gate",)
        ),
        routing=SoftmaxRouting(standard_parts.experts_per_token(config, num_experts), renormalize=True),
        experts=standard_parts.experts(
            f"{stored}.experts",
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            names=("w1", "w3", "w2"),
            alias_names=("gate_proj", "up_proj", "down_proj"),
            fused_prefix=f"{module}.experts",
        ),
    )
