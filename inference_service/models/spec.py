"""What a model family declares: shapes, weight names, router and LoRA sites, as data.

A family's file turns a config into a ModelSpec; `build.py` turns that and a checkpoint into layers, and
`lora_sites.py` into the LoRA schema. Nothing else knows a family.
"""

from dataclasses import dataclass

from inference_service.models.attention_spec import AnyAttentionSpec
from inference_service.models.linear_spec import Fp8Format, LinearSpec, Module, SiteSpec
from lorikeet_contract.schema import ParameterLayout, RowOrder
from lorikeet_kernels.dense.gated_activation import SILU, GatedActivation


@dataclass(frozen=True, slots=True)
class DenseMlpSpec:
    """Gate and up as one projection, then down."""

    gate_up: LinearSpec
    down: LinearSpec

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All projections."""
        return (self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class SoftmaxRouting:
    """Softmax over the experts, the top_k largest, made to sum to 1 where `renormalize`."""

    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class GroupedSoftmaxRouting:
    """Softmax over the experts; the top_k largest within the groups of the largest members; times `scale`."""

    top_k: int
    num_groups: int
    top_k_groups: int
    scale: float


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """The top_k largest logits, each weighted by its own sigmoid."""

    top_k: int


@dataclass(frozen=True, slots=True)
class GroupedSigmoidRouting:
    """Sigmoid scores; chosen within the best groups by score plus the weight `correction_bias` [E]."""

    top_k: int
    num_groups: int
    top_k_groups: int
    renormalize: bool
    scale: float
    correction_bias: str


Routing = SoftmaxRouting | GroupedSoftmaxRouting | SigmoidRouting | GroupedSigmoidRouting


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
    `parameter_layout` how that parameter stores a matrix. `storage` is how the checkpoint does, in FP8 where
    `fp8` says how: one by one, or fused if it has the fused tensor, whose scales lie in "<name>_scale".
    """

    in_features: int
    site: SiteSpec
    parameter: str
    parameter_layout: ParameterLayout = ParameterLayout.OUT_IN
    storage: ExpertStorage = PerExpertWeights()
    bias: str | None = None
    fp8: Fp8Format | None = None


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """All experts of a layer. `row_order` is how gate's and up's rows lie, here as in fused tensors."""

    num_experts: int
    gate_up: ExpertLinearSpec
    down: ExpertLinearSpec
    row_order: RowOrder = RowOrder.CONCATENATED
    activation: GatedActivation = SILU


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """An MLP for every token beside the routed experts; times the sigmoid of `gate`'s one output, if any."""

    mlp: DenseMlpSpec
    gate: LinearSpec | None = None

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All projections."""
        return self.mlp.linears if self.gate is None else (*self.mlp.linears, self.gate)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Router, its rule, and the experts. `scales_input`: weights multiply the experts' input, not output."""

    router: LinearSpec
    routing: Routing
    experts: ExpertsSpec
    shared: SharedExpertSpec | None = None
    scales_input: bool = False

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All projections but the routed experts'."""
        return (self.router,) if self.shared is None else (self.router, *self.shared.linears)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer; norms are weight names [H]."""

    input_norm: str
    attention: AnyAttentionSpec
    mlp_norm: str
    mlp: DenseMlpSpec | MoeSpec

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All projections but the routed experts', in the order of their LoRA sites."""
        return (*self.attention.linears, *self.mlp.linears)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The routed experts; their sites follow the others."""
        return self.mlp.experts if isinstance(self.mlp, MoeSpec) else None


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What the embedding, each layer's two updates of the residual, and the logits are multiplied by."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. Tied embeddings: `lm_head_weight` equals `embed_weight`.

    `weight_prefix` stands before all names in the checkpoint, and not in those that LoRA files use.
    `ignored_weights` are whole names that the model does not need; one that ends in "." means all below it.
    """

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
    multipliers: Multipliers = Multipliers()
    weight_prefix: str = ""
