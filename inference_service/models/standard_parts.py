"""Specs of the parts that most families name as Llama did; a family's file composes them."""

from inference_service.layers.rope import RopeParameters
from inference_service.models.config import ConfigReader
from inference_service.models.spec import (
    AttentionSpec,
    DenseMlpSpec,
    ExpertLinearSpec,
    ExpertsSpec,
    HeadNormSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    Module,
    SiteSpec,
)


def single(key: str, path: str, in_features: int, out_features: int, *, bias: bool = False) -> LinearSpec:
    """A projection of one module that is one site."""
    return LinearSpec(in_features, (SiteSpec(key, (Module(key, path, out_features),)),), bias)


def attention(
    prefix: str,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: RopeParameters | None,
    bias: bool = False,
    output_bias: bool = False,
    head_norm: bool = False,
    window: int | None = None,
    sinks: bool = False,
) -> AttentionSpec:
    """`<prefix>.{q,k,v,o}_proj`, `{q,k}_norm` where `head_norm` and `sinks` where `sinks`."""
    widths = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    sites = tuple(
        SiteSpec(key, (Module(key, f"{prefix}.{key}_proj", width),)) for key, width in widths.items()
    )
    norms = HeadNormSpec(f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
    return AttentionSpec(
        qkv=LinearSpec(hidden_size, sites, bias),
        o=single("o", f"{prefix}.o_proj", widths["q"], hidden_size, bias=output_bias),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        head_norm=norms if head_norm else None,
        window=window,
        sinks=f"{prefix}.sinks" if sinks else None,
    )


def dense_mlp(prefix: str, *, hidden_size: int, intermediate_size: int) -> DenseMlpSpec:
    """`<prefix>.{gate,up,down}_proj`."""
    gate = Module("gate", f"{prefix}.gate_proj", intermediate_size)
    up = Module("up", f"{prefix}.up_proj", intermediate_size)
    return DenseMlpSpec(
        gate_up=LinearSpec(hidden_size, (SiteSpec("mlp_gate_up", (gate, up)),)),
        down=single("mlp_down", f"{prefix}.down_proj", intermediate_size, hidden_size),
    )


def experts(
    prefix: str,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    alias_names: tuple[str, str, str] = ("w1", "w3", "w2"),
    fused_prefix: str | None = None,
) -> ExpertsSpec:
    """`<prefix>.{expert}.<name>` for gate, up and down; LoRA files may say `alias_names` instead.

    `fused_prefix` is where transformers keeps the fused parameters, `prefix` by default.
    """
    widths = (intermediate_size, intermediate_size, hidden_size)
    gate, up, down = (
        Module(key, f"{prefix}.{{expert}}.{name}", width, (f"{prefix}.{{expert}}.{alias}",))
        for key, name, alias, width in zip(("gate", "up", "down"), names, alias_names, widths, strict=True)
    )
    fused = fused_prefix or prefix
    return ExpertsSpec(
        num_experts=num_experts,
        gate_up=ExpertLinearSpec(hidden_size, SiteSpec("gate_up", (gate, up)), f"{fused}.gate_up_proj"),
        down=ExpertLinearSpec(intermediate_size, SiteSpec("down", (down,)), f"{fused}.down_proj"),
    )


def decoder(config: ConfigReader, layers: tuple[LayerSpec, ...], *, tied_by_default: bool) -> ModelSpec:
    """Embedding, final norm and head around `layers`, named as usual."""
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    tied = config.boolean("tie_word_embeddings", tied_by_default)
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        embed=Module("embed", "model.embed_tokens", hidden_size),
        embed_weight="model.embed_tokens.weight",
        layers=layers,
        final_norm="model.norm.weight",
        lm_head=Module("lm_head", "lm_head", vocab_size),
        lm_head_weight="model.embed_tokens.weight" if tied else "lm_head.weight",
        # A tied checkpoint may hold the head all the same; transformers ties over it.
        ignored_weights=("lm_head.weight",) if tied else (),
    )
