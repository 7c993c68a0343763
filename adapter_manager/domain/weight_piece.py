"""A pair of tensors and the part of a site that it fills, with both factors seen in their canonical axes."""

from dataclasses import dataclass

from adapter_manager.domain.safetensors_header import TensorEntry
from lorikeet_contract.schema import LoraSite


@dataclass(frozen=True, slots=True)
class Factor:
    """One tensor seen as [groups, rows, columns] of the canonical A or B.

    The element (g, i, j) is the tensor's flat element g * strides[0] + i * strides[1] + j * strides[2]. A
    group is an expert; a stride of 0 gives the same weights to all of them.
    """

    entry: TensorEntry
    strides: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Canonical A is [groups, rank, in], B is [groups, rows of the slice or of the site, rank].

    `slice_index` None: all slices, rows in the model's own order. `expert` None: all experts, or no experts.
    """

    site: LoraSite
    slice_index: int | None
    expert: int | None
    rank: int
    scale: float
    layout: str
    a: Factor
    b: Factor

    @property
    def num_groups(self) -> int:
        """Experts that it covers; 1 for a site without experts."""
        return 1 if self.expert is not None else max(1, self.site.num_experts)

    @property
    def num_rows(self) -> int:
        """Rows of B that it covers."""
        if self.slice_index is None:
            return self.site.out_features
        return self.site.slices[self.slice_index].out_features
