"""How gate's and up's output rows lie in a fused gate_up projection."""

from typing import Literal

RowOrder = Literal["concatenated", "interleaved"]


def slice_columns(row_order: RowOrder, out_features: int, index: int) -> slice:
    """The columns that belong to slice `index` (0 gate, 1 up) of `out_features` columns in all."""
    if row_order == "interleaved":
        return slice(index, out_features, 2)
    half = out_features // 2
    return slice(index * half, (index + 1) * half)
