"""Qwen3-MoE: head norms on q and k, softmax routing, dense layers where the config says so."""

from inference_service.layers.rope import RopeParameters
from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import DenseMlpSpec, LayerSpec, ModelSpec, MoeSpec, SoftmaxRouting

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)
TIED_BY_DEFAULT = False


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Qwen3-MoE config describes."""
    config.require("hidden_act", ("silu",), "silu")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    rope = read_rope(config, head_dim)
    num_layers = config.integer("num_hidden_layers")
    layers = tuple(
        _layer(config, index, hidden_size, num_heads, head_dim, rope) for index in range(num_layers)
    )
    return standard_parts.decoder(config, layers, tied_by_default=TIED_BY_DEFAULT)


def _layer(
    config: ConfigReader, index: int, hidden_size: int, num_heads: int, head_dim: int, rope: RopeParameters
) -> LayerSpec:
    prefix = f"model.layers.{index}"
    has_bias = config.boolean("attention_bias", default=False)
    use_window = config.boolean("use_sliding_window", default=False)
    return LayerSpec(
        input_norm=f"{prefix}.input_layernorm.weight",
        attention=standard_parts.attention(
            f"{prefix}.self_attn",
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rope=rope,
            bias=has_bias,
            output_bias=has_bias,
            head_norm=True,
            window=config.optional_integer("sliding_window") if use_window else None,
        ),
        mlp_norm=f"{prefix}.post_attention_layernorm.weight",
        mlp=_mlp(config, f"{prefix}.mlp", index, hidden_size),
    )


def _mlp(config: ConfigReader, prefix: str, index: int, hidden_size: int) -> DenseMlpSpec | MoeSpec:
    num_experts = standard_parts.expert_count(config, minimum=0)
    if not standard_parts.is_sparse(config, index, num_experts):
        return standard_parts.dense_mlp(
            prefix, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size")
        )
    top_k = standard_parts.experts_per_token(config, num_experts)
    return MoeSpec(
        router=standard_parts.single("router", f"{prefix}.gate", hidden_size, num_experts),
        routing=SoftmaxRouting(top_k, renormalize=config.boolean("norm_topk_prob", default=False)),
        experts=standard_parts.experts(
            f"{prefix}.experts",
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=config.integer("moe_intermediate_size"),
        ),
    )
