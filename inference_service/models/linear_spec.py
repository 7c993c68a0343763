"""What a model family declares of its projections: checkpoint modules, and the LoRA sites they make up."""

from dataclasses import dataclass


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
