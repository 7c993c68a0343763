"""GPT-OSS: sinks, a window in every other layer, biases, interleaved and clamped experts, maybe in MXFP4."""

from inference_service.models import standard_parts
from inference_service.models.config import ConfigReader
from inference_service.models.errors import ModelConfigError
from inference_service.models.linear_spec import SiteSpec
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import (
    ExpertLinearSpec,
    ExpertsSpec,
    FusedWeights,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    Mxfp4Weights,
    SoftmaxRouting,
)
from lorikeet_contract.schema import ParameterLayout, RowOrder
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.experts.mxfp4 import BLOCK

ARCHITECTURES = ("GptOssForCausalLM",)
MODEL_TYPES = ("gpt_oss",)
QUANTIZATIONS = ("mxfp4",)
_SLIDING, _FULL = "sliding_attention", "full_attention"


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a GPT-OSS config describes."""
    config.require("hidden_act", ("silu",), "silu")
    if config.section("rope_scaling") is None and config.section("rope_parameters") is None:
        raise config.fail("rope_scaling", "an object")
    layers = tuple(_layer(config, index, kind) for index, kind in enumerate(_layer_types(config)))
    return standard_parts.decoder(config, layers, tied_by_default=False)


def _layer(config: ConfigReader, index: int, kind: str) -> LayerSpec:
    prefix = f"model.layers.{index}"
    head_dim, num_heads = config.integer("head_dim"), config.integer("num_attention_heads")
    has_bias = config.boolean("attention_bias", default=True)
    return LayerSpec(
        input_norm=f"{prefix}.input_layernorm.weight",
        attention=standard_parts.attention(
            f"{prefix}.self_attn",
            hidden_size=config.integer("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rope=read_rope(config, head_dim),
            bias=has_bias,
            output_bias=has_bias,
            window=config.integer("sliding_window") if kind == _SLIDING else None,
            sinks=True,
        ),
        mlp_norm=f"{prefix}.post_attention_layernorm.weight",
        mlp=_moe(config, f"{prefix}.mlp"),
    )


def _layer_types(config: ConfigReader) -> tuple[str, ...]:
    """Each layer's kind of attention; alternating, a window first, where the config does not say."""
    num_layers = config.integer("num_hidden_layers")
    kinds = config.texts("layer_types", ()) or tuple((_SLIDING, _FULL)[i % 2] for i in range(num_layers))
    if len(kinds) != num_layers or not all(kind in (_SLIDING, _FULL) for kind in kinds):
        raise config.fail("layer_types", f"{num_layers} of {_SLIDING!r} and {_FULL!r}")
    return kinds


def _moe(config: ConfigReader, prefix: str) -> MoeSpec:
    hidden_size, num_experts = config.integer("hidden_size"), config.integer("num_local_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.fail("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
    return MoeSpec(
        router=standard_parts.single("router", f"{prefix}.router", hidden_size, num_experts, bias=True),
        routing=SoftmaxRouting(top_k, renormalize=True),
        experts=_experts(config, f"{prefix}.experts", num_experts, hidden_size),
    )


def _experts(config: ConfigReader, prefix: str, num_experts: int, hidden_size: int) -> ExpertsSpec:
    """Adapters may name them as other families store them; the checkpoint fuses them."""
    listed = standard_parts.experts(
        prefix,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
    )
    is_packed = _is_packed(config)
    return ExpertsSpec(
        num_experts=num_experts,
        gate_up=_expert_linear(hidden_size, listed.gate_up.site, f"{prefix}.gate_up_proj", is_packed),
        down=_expert_linear(listed.down.in_features, listed.down.site, f"{prefix}.down_proj", is_packed),
        row_order=RowOrder.INTERLEAVED,
        activation=GatedActivation(
            alpha=config.number("swiglu_alpha", 1.702),
            limit=config.number("swiglu_limit", 7.0),
            up_offset=1.0,
        ),
    )


def _expert_linear(in_features: int, site: SiteSpec, parameter: str, is_packed: bool) -> ExpertLinearSpec:
    packed = Mxfp4Weights(f"{parameter}_blocks", f"{parameter}_scales")
    return ExpertLinearSpec(
        in_features=in_features,
        site=site,
        parameter=parameter,
        parameter_layout=ParameterLayout.IN_OUT,
        storage=packed if is_packed else FusedWeights(parameter, is_transposed=True),
        bias=f"{parameter}_bias",
    )


def _is_packed(config: ConfigReader) -> bool:
    quantization = config.section("quantization_config")
    if quantization is None:
        return False
    unconverted = quantization.texts("modules_to_not_convert", ())
    if any("experts" in name for name in unconverted):
        raise ModelConfigError(
            f"{quantization.where}: modules_to_not_convert is {list(unconverted)!r}; this server reads the "
            "experts of all layers in MXFP4 or of none"
        )
    for name in ("hidden_size", "intermediate_size"):
        if config.integer(name) % BLOCK:
            raise config.fail(name, f"a multiple of {BLOCK}, MXFP4's block")
    return True
