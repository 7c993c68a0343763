"""How gate's and up's output rows lie in a fused gate_up projection."""

from typing import Literal, get_args

RowOrder = Literal["concatenated", "interleaved"]
_ROW_ORDERS: tuple[str, ...] = get_args(RowOrder)


def check_row_order(row_order: str) -> None:
    """Refuse any other word: each op would take it for one of the two.

    Raises:
        ValueError: it is neither.
    """
    if row_order not in _ROW_ORDERS:
        raise ValueError(f"row_order {row_order!r} is neither of {', '.join(_ROW_ORDERS)}")


def slice_columns(row_order: RowOrder, out_features: int, index: int) -> slice:
    """The columns that belong to slice `index` (0 gate, 1 up) of `out_features` columns in all."""
    check_row_order(row_order)
    if row_order == "interleaved":
        return slice(index, out_features, 2)
    half = out_features // 2
    return slice(index * half, (index + 1) * half)
