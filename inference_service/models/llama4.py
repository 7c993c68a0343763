"""Llama 4, text: chunked attention, layers without rotation, one expert a token with a weighted input."""

from dataclasses import replace

from inference_service.models import standard_parts
from inference_service.models.attention_spec import (
    AttentionSpec,
    QueryTemperatureSpec,
    UnitNormSpec,
)
from inference_service.models.config import ConfigReader
from inference_service.models.rope_config import read_rope
from inference_service.models.spec import (
    DenseMlpSpec,
    ExpertLinearSpec,
    ExpertsSpec,
    FusedWeights,
    ModelSpec,
    MoeSpec,
    SharedExpertSpec,
    SigmoidRouting,
)
from lorikeet_contract.schema import ParameterLayout

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
MODEL_TYPES = ("llama4_text", "llama4")
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_TOWERS = ("vision_model.", "multi_modal_projector.")


def declare(config: ConfigReader) -> ModelSpec:
    """The model that a Llama 4 config describes; of a multimodal one the text model."""
    text = config.section("text_config")
    if text is None:
        return _declare_text(config)
    spec = _declare_text(text)
    ignored = (*(f"language_model.{name}" for name in spec.ignored_weights), *_TOWERS)
    return replace(spec, weight_prefix="language_model.", ignored_weights=ignored)


def _declare_text(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", ("silu",), "silu")
    # A token's experts would each see another input: only one is served, as in all released models.
    config.require("num_experts_per_tok", (1,), 1)
    num_layers = config.integer("num_hidden_layers")
    rotates = _rotating_layers(config, num_layers)
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.integers("moe_layers", tuple(range(step - 1, num_layers, step)))
    layers = tuple(
        standard_parts.layer(
            index,
            _attention(config, index, rotates=rotates[index]),
            _moe(config, index) if index in sparse else _dense(config, index),
        )
        for index in range(num_layers)
    )
    return standard_parts.decoder(config, layers, tied_by_default=False, default_eps=1e-5)


def _rotating_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Which layers rotate: `no_rope_layers` has a 1 for those that do."""
    interval = config.integer("no_rope_layer_interval", 4)
    listed = config.integers("no_rope_layers", ())
    rotates = listed or tuple(int((index + 1) % interval != 0) for index in range(num_layers))
    if len(rotates) != num_layers:
        raise config.fail("no_rope_layers", f"{num_layers} of 0 and 1")
    has_chunks = _chunk(config) is not None
    kinds = [_CHUNKED if rotates_here and has_chunks else _FULL for rotates_here in rotates]
    config.require("layer_types", (kinds,), kinds)  # another way to say the same
    return rotates


def _attention(config: ConfigReader, index: int, *, rotates: int) -> AttentionSpec:
    has_bias = config.boolean("attention_bias", default=False)
    rope = read_rope(config, standard_parts.head_dim(config), default_theta=5e5) if rotates else None
    spec = standard_parts.configured_attention(
        config,
        f"{standard_parts.layer_prefix(index)}.self_attn",
        rope=rope,
        bias=has_bias,
        output_bias=has_bias,
        chunk=_chunk(config) if rotates else None,
    )
    if rotates:
        norm = UnitNormSpec() if config.boolean("use_qk_norm", default=True) else None
        return replace(spec, is_pairwise=True, head_norm=norm, norms_rotated=True)
    if not config.boolean("attn_temperature_tuning", default=True):
        return spec
    strength, interval = config.number("attn_scale", 0.1), config.integer("floor_scale", 8192)
    return replace(spec, temperature=QueryTemperatureSpec(strength, interval))


def _chunk(config: ConfigReader) -> int | None:
    """Null means no chunks; a config that does not say has the default."""
    if "attention_chunk_size" in config.fields:
        return config.optional_integer("attention_chunk_size")
    return 8192


def _dense(config: ConfigReader, index: int) -> DenseMlpSpec:
    return standard_parts.dense_mlp(
        f"{standard_parts.layer_prefix(index)}.feed_forward",
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size_mlp"),
    )


def _moe(config: ConfigReader, index: int) -> MoeSpec:
    prefix = f"{standard_parts.layer_prefix(index)}.feed_forward"
    hidden_size, num_experts = config.integer("hidden_size"), standard_parts.expert_count(config)
    experts = standard_parts.experts(
        f"{prefix}.experts",
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
    )
    shared = standard_parts.dense_mlp(
        f"{prefix}.shared_expert",
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        key="shared",
    )
    return MoeSpec(
        router=standard_parts.single("router", f"{prefix}.router", hidden_size, num_experts),
        routing=SigmoidRouting(top_k=1),
        experts=_stacked(experts),
        shared=SharedExpertSpec(shared),
        scales_input=True,
    )


def _stacked(experts: ExpertsSpec) -> ExpertsSpec:
    """The same experts, stored and adapted as parameters [E, in, out]."""

    def stacked(linear: ExpertLinearSpec) -> ExpertLinearSpec:
        storage = FusedWeights(linear.parameter, is_transposed=True)
        return replace(linear, parameter_layout=ParameterLayout.IN_OUT, storage=storage)

    return replace(experts, gate_up=stacked(experts.gate_up), down=stacked(experts.down))
