"""What a model family declares: shapes, weight names, router and LoRA sites, as data.

A family's file turns a config into a ModelSpec; `build.py` turns that and a checkpoint into layers, and
`lora_sites.py` into the LoRA schema. Nothing else knows a family.
"""

from dataclasses import dataclass

from inference_service.layers.rope import RopeParameters
from lorikeet_contract.schema import RowOrder
from lorikeet_kernels.gated_activation import SILU, GatedActivation


@dataclass(frozen=True, slots=True)
class Module:
    """A checkpoint module whose rows are a slice of a projection.

    `path` names its weight ("<path>.weight", and "<path>.bias") and its LoRA; `aliases` are further paths
    that a LoRA file may use. For experts, "{expert}" stands for the expert's index.
    """

    name: str
    path: str
    out_features: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteSpec:
    """A LoRA site: its key and the modules whose rows it covers, one, or gate and up."""

    key: str
    modules: tuple[Module, ...]

    @property
    def out_features(self) -> int:
        """Rows of all modules."""
        return sum(m.out_features for m in self.modules)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A projection, its sites side by side in its columns."""

    in_features: int
    sites: tuple[SiteSpec, ...]
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """Names of the head norms' weights [D]."""

    q_weight: str
    k_weight: str


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over q, k, v as one projection. `scale` multiplies the scores."""

    qkv: LinearSpec
    o: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeParameters | None
    head_norm: HeadNormSpec | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DenseMlpSpec:
    """Gate and up as one projection, then down."""

    gate_up: LinearSpec
    down: LinearSpec


@dataclass(frozen=True, slots=True)
class SoftmaxRouting:
    """Softmax over the experts, the top_k largest, made to sum to 1 where `renormalize`."""

    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """All experts of a layer, stored per expert in the checkpoint, fused here.

    `gate_up_parameter` and `down_parameter` are the fused parameters' names in transformers, which LoRA files
    with stacked tensors use.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate: Module
    up: Module
    down: Module
    gate_up_parameter: str
    down_parameter: str
    row_order: RowOrder = RowOrder.CONCATENATED
    activation: GatedActivation = SILU


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Router, its rule, and the experts."""

    router: LinearSpec
    routing: SoftmaxRouting
    experts: ExpertsSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer; norms are weight names [H]."""

    input_norm: str
    attention: AttentionSpec
    mlp_norm: str
    mlp: DenseMlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. Tied embeddings: `lm_head_weight` equals `embed_weight`."""

    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    embed: Module
    embed_weight: str
    layers: tuple[LayerSpec, ...]
    final_norm: str
    lm_head: Module
    lm_head_weight: str
    ignored_weights: tuple[str, ...] = ()
