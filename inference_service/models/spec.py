"""What a model family declares: shapes, weight names, router and LoRA sites, as data.

A family's file turns a config into a ModelSpec; `build.py` turns that and a checkpoint into layers, and
`lora_sites.py` into the LoRA schema. Nothing else knows a family.
"""

from dataclasses import dataclass

from inference_service.layers.rope import RopeParameters
from lorikeet_contract.schema import ParameterLayout, RowOrder
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
    """Attention over q, k, v as one projection. `scale` multiplies the scores, `sinks` names a weight."""

    qkv: LinearSpec
    o: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeParameters | None
    head_norm: HeadNormSpec | None = None
    window: int | None = None
    sinks: str | None = None


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
class PerExpertWeights:
    """Stored as a tensor for each module of each expert, "<module.path>.weight" [out, in]."""


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Stored as one tensor of all experts, [E, out, in], or [E, in, out] where `is_transposed`."""

    name: str
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Mxfp4Weights:
    """Stored, and held, as four-bit blocks [E, out, in / 32, 16] and their scales [E, out, in / 32]."""

    blocks: str
    scales: str


ExpertStorage = PerExpertWeights | FusedWeights | Mxfp4Weights


@dataclass(frozen=True, slots=True)
class ExpertLinearSpec:
    """One projection of all experts, which is one LoRA site. `bias` names a tensor [E, out].

    `parameter` is the fused parameter's name in transformers, which LoRA files with stacked tensors use, and
    `parameter_layout` how that parameter stores a matrix. `storage` is how the checkpoint does.
    """

    in_features: int
    site: SiteSpec
    parameter: str
    parameter_layout: ParameterLayout = ParameterLayout.OUT_IN
    storage: ExpertStorage = PerExpertWeights()
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """All experts of a layer. `row_order` is how gate's and up's rows lie, here as in fused tensors."""

    num_experts: int
    gate_up: ExpertLinearSpec
    down: ExpertLinearSpec
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
