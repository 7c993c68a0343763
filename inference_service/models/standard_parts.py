"""Specs of the parts that most families name as Llama did; a family's file composes them."""

from inference_service.layers.rope import RopeParameters
from inference_service.models.attention_spec import (
    AnyAttentionSpec,
    AttentionSpec,
    HeadNormSpec,
)
from inference_service.models.config import ConfigReader
from inference_service.models.linear_spec import LinearSpec, Module, SiteSpec
from inference_service.models.spec import (
    DenseMlpSpec,
    ExpertLinearSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    Multipliers,
    SharedExpertSpec,
    SoftmaxRouting,
)

NO_MULTIPLIERS = Multipliers()
# The same count under the names of one family or another, and as transformers 5 writes it for all of them.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def single(
    key: str,
    path: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    aliases: tuple[str, ...] = (),
) -> LinearSpec:
    """A projection of one module that is one site."""
    return LinearSpec(in_features, (SiteSpec(key, (Module(key, path, out_features, aliases),)),), bias)


def layer_prefix(index: int) -> str:
    """Where a layer's tensors lie."""
    return f"model.layers.{index}"


def layer(index: int, attention: AnyAttentionSpec, mlp: DenseMlpSpec | MoeSpec) -> LayerSpec:
    """A layer whose norms are named as usual."""
    prefix = layer_prefix(index)
    return LayerSpec(
        input_norm=f"{prefix}.input_layernorm.weight",
        attention=attention,
        mlp_norm=f"{prefix}.post_attention_layernorm.weight",
        mlp=mlp,
    )


def head_dim(config: ConfigReader) -> int:
    """`head_dim`, or the hidden size shared out between the heads."""
    return config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))


def expert_count(config: ConfigReader, *, minimum: int = 1) -> int:
    """The number of routed experts."""
    known = next((name for name in _EXPERT_COUNTS if name in config.fields), _EXPERT_COUNTS[0])
    return config.integer(known, minimum=minimum)


def is_sparse(config: ConfigReader, index: int, num_experts: int) -> bool:
    """Whether a layer has experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    return (
        num_experts > 0
        and index not in config.integers("mlp_only_layers", ())
        and (index + 1) % config.integer("decoder_sparse_step", 1) == 0
    )


def experts_per_token(config: ConfigReader, num_experts: int) -> int:
    """`num_experts_per_tok`, refused where it is more than there are."""
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.fail("num_experts_per_tok", f"at most num_experts, {num_experts}")
    return top_k


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
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
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
        scale=head_dim**-0.5 if scale is None else scale,
        rope=rope,
        head_norm=norms if head_norm else None,
        window=window,
        chunk=chunk,
        sinks=f"{prefix}.sinks" if sinks else None,
    )


def configured_attention(
    config: ConfigReader,
    prefix: str,
    *,
    rope: RopeParameters | None,
    bias: bool,
    output_bias: bool,
    head_norm: bool = False,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> AttentionSpec:
    """`attention` with the sizes that the config gives under their usual names."""
    num_heads = config.integer("num_attention_heads")
    return attention(
        prefix,
        hidden_size=config.integer("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim(config),
        rope=rope,
        bias=bias,
        output_bias=output_bias,
        head_norm=head_norm,
        scale=scale,
        window=window,
        chunk=chunk,
    )


def dense_mlp(
    prefix: str, *, hidden_size: int, intermediate_size: int, key: str = "mlp", bias: bool = False
) -> DenseMlpSpec:
    """`<prefix>.{gate,up,down}_proj`; the sites are `<key>_gate_up` and `<key>_down`."""
    gate = Module("gate", f"{prefix}.gate_proj", intermediate_size)
    up = Module("up", f"{prefix}.up_proj", intermediate_size)
    return DenseMlpSpec(
        gate_up=LinearSpec(hidden_size, (SiteSpec(f"{key}_gate_up", (gate, up)),), bias),
        down=single(f"{key}_down", f"{prefix}.down_proj", intermediate_size, hidden_size, bias=bias),
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


def softmax_moe(
    config: ConfigReader,
    prefix: str,
    *,
    num_experts: int,
    intermediate_size: int,
    shared: SharedExpertSpec | None = None,
) -> MoeSpec:
    """`<prefix>.gate` over `<prefix>.experts`: softmax, made to sum to 1 where `norm_topk_prob` says so."""
    hidden_size = config.integer("hidden_size")
    return MoeSpec(
        router=single("router", f"{prefix}.gate", hidden_size, num_experts),
        routing=SoftmaxRouting(
            experts_per_token(config, num_experts),
            renormalize=config.boolean("norm_topk_prob", default=False),
        ),
        experts=experts(
            f"{prefix}.experts",
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
        ),
        shared=shared,
    )


def decoder(
    config: ConfigReader,
    layers: tuple[LayerSpec, ...],
    *,
    tied_by_default: bool,
    default_eps: float = 1e-6,
    multipliers: Multipliers = NO_MULTIPLIERS,
) -> ModelSpec:
    """Embedding, final norm and head around `layers`, named as usual."""
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    tied = config.boolean("tie_word_embeddings", tied_by_default)
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", default_eps),
        embed=Module("embed", "model.embed_tokens", hidden_size),
        embed_weight="model.embed_tokens.weight",
        layers=layers,
        final_norm="model.norm.weight",
        lm_head=Module("lm_head", "lm_head", vocab_size),
        lm_head_weight="model.embed_tokens.weight" if tied else "lm_head.weight",
        # A tied checkpoint may hold the head all the same; transformers ties over it.
        ignored_weights=("lm_head.weight",) if tied else (),
        multipliers=multipliers,
    )
