"""What a model family declares of its projections: checkpoint modules, and the LoRA sites they make up."""

from dataclasses import dataclass
from typing import Literal

from lorikeet_kernels.dense.quantize_rows import Scaling


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
class Fp8Format:
    """How matrices are stored in e4m3, and how their input is quantised.

    `weights` says what shares a scale: 128 x 128 elements, a row, or a whole module's matrix (of one expert);
    "<module>.<scale_suffix>" holds them. "static" activations have theirs in "<module>.input_scale"; `bound`
    limits those measured of a row. Weights that are not `is_stored` so are quantised while they are read,
    those that `is_dequantized` names are held in the compute dtype.
    """

    weights: Literal["block", "channel", "tensor"]
    activations: Scaling
    scale_suffix: str = "weight_scale"
    bound: float | None = None
    is_stored: bool = True
    is_dequantized: bool = False


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
    """A projection, its sites side by side in its columns; `fp8` where its weight is quantised."""

    in_features: int
    sites: tuple[SiteSpec, ...]
    has_bias: bool = False
    fp8: Fp8Format | None = None
