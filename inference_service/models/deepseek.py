"""DeepSeek's layers: latent attention, the first ones dense, shared experts beside the routed ones."""

from collections.abc import Callable
from dataclasses import replace

from inference_service.layers.rope import RopeParameters, yarn_mscale
from inference_service.models import standard_parts
from inference_service.models.attention_spec import LatentAttentionSpec
from inference_service.models.config import ConfigReader
from inference_service.models.linear_spec import LinearSpec, Module, SiteSpec
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import (
    DenseMlpSpec,
    ModelSpec,
    MoeSpec,
    Routing,
    SharedExpertSpec,
)

RoutingOf = Callable[[ConfigReader, str, int], Routing]
"""A layer's routing, from the config, the router's module and the number of experts."""

# The latents' norms have this epsilon in the released code, whatever the config's is.
_LATENT_EPS = 1e-6


def declare(config: ConfigReader, routing_of: RoutingOf, *, is_pairwise: bool) -> ModelSpec:
    """The model of a DeepSeek config whose rotation pairs neighbours where `is_pairwise`."""
    config.require("hidden_act", ("silu",), "silu")
    config.require("moe_layer_freq", (1,), 1)
    config.require("attention_bias", (False,), default=False)
    num_layers = config.integer("num_hidden_layers")
    num_dense = config.integer("first_k_dense_replace", 0, minimum=0)
    layers = tuple(
        standard_parts.layer(
            index,
            _attention(config, f"{standard_parts.layer_prefix(index)}.self_attn", is_pairwise=is_pairwise),
            _mlp(
                config,
                f"{standard_parts.layer_prefix(index)}.mlp",
                routing_of if index >= num_dense else None,
            ),
        )
        for index in range(num_layers)
    )
    spec = standard_parts.decoder(config, layers, tied_by_default=False)
    # Released checkpoints hold, behind the layers, others that guess further tokens ahead.
    num_ahead = config.integer("num_nextn_predict_layers", 0, minimum=0)
    ahead = (f"{standard_parts.layer_prefix(num_layers + index)}." for index in range(num_ahead))
    return replace(spec, ignored_weights=(*spec.ignored_weights, *ahead))


def _attention(config: ConfigReader, prefix: str, *, is_pairwise: bool) -> LatentAttentionSpec:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    plain_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.fail("qk_rope_head_dim", "an even number: elements turn in pairs")
    latent_dim, value_dim = config.integer("kv_lora_rank"), config.integer("v_head_dim")
    rope = read_rope(config, rope_dim)
    num_query = num_heads * (plain_dim + rope_dim)
    query, q_norm, q_up = _site(prefix, "q", "q_proj", num_query), None, None
    if (query_latent := config.optional_integer("q_lora_rank")) is not None:
        query = _site(prefix, "q_a", "q_a_proj", query_latent)
        q_norm = f"{prefix}.q_a_layernorm.weight"
        q_up = standard_parts.single("q_b", f"{prefix}.q_b_proj", query_latent, num_query)
    return LatentAttentionSpec(
        down=LinearSpec(
            hidden_size, (query, _site(prefix, "kv_a", "kv_a_proj_with_mqa", latent_dim + rope_dim))
        ),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=f"{prefix}.kv_a_layernorm.weight",
        kv_up=standard_parts.single(
            "kv_b", f"{prefix}.kv_b_proj", latent_dim, num_heads * (plain_dim + value_dim)
        ),
        o=standard_parts.single("o", f"{prefix}.o_proj", num_heads * value_dim, hidden_size),
        num_heads=num_heads,
        latent_dim=latent_dim,
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        scale=(plain_dim + rope_dim) ** -0.5 * _sharpening(rope),
        rope=rope,
        is_pairwise=is_pairwise,
        latent_eps=_LATENT_EPS,
    )


def _site(prefix: str, key: str, name: str, out_features: int) -> SiteSpec:
    return SiteSpec(key, (Module(key, f"{prefix}.{name}", out_features),))


def _sharpening(rope: RopeParameters) -> float:
    """What the scores of a stretched context are multiplied by."""
    if rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _mlp(config: ConfigReader, prefix: str, routing_of: RoutingOf | None) -> DenseMlpSpec | MoeSpec:
    hidden_size = config.integer("hidden_size")
    if routing_of is None:
        return standard_parts.dense_mlp(
            prefix, hidden_size=hidden_size, intermediate_size=config.integer("intermediate_size")
        )
    num_experts, inner = standard_parts.expert_count(config), config.integer("moe_intermediate_size")
    num_shared = config.integer("n_shared_experts", 0, minimum=0)
    shared = standard_parts.dense_mlp(
        f"{prefix}.shared_experts",
        hidden_size=hidden_size,
        intermediate_size=inner * num_shared,
        key="shared",
    )
    return MoeSpec(
        router=standard_parts.single("router", f"{prefix}.gate", hidden_size, num_experts),
        routing=routing_of(config, f"{prefix}.gate", num_experts),
        experts=standard_parts.experts(
            f"{prefix}.experts",
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=inner,
        ),
        shared=SharedExpertSpec(shared) if num_shared else None,
    )


def expert_groups(config: ConfigReader, num_experts: int) -> tuple[int, int]:
    """How many groups the experts form, and how many of these a token may choose from."""
    num_groups = config.integer("n_group")
    if num_experts % num_groups:
        raise config.fail("n_group", f"a divisor of the number of experts, {num_experts}")
    top_k_groups = config.integer("topk_group")
    if top_k_groups > num_groups:
        raise config.fail("topk_group", f"at most n_group, {num_groups}")
    top_k, choice = config.integer("num_experts_per_tok"), top_k_groups * (num_experts // num_groups)
    if top_k > choice:
        raise config.fail("num_experts_per_tok", f"at most the experts of topk_group groups, {choice}")
    return num_groups, top_k_groups
