"""Pairs of tensors checked against the place they are meant for, and seen in the canonical axes."""

from adapter_manager.domain.layout_options import ExpertOrientation, ExpertPacking
from adapter_manager.domain.site_index import PairForm
from adapter_manager.domain.tensor_pairs import LoraPair
from adapter_manager.domain.weight_piece import Factor
from lorikeet_contract.schema import LoraSite

Strides = tuple[int, int, int]


class ShapeMismatchError(ValueError):
    """A pair's shapes do not fit its place; the message says what was expected."""


def plain_factors(pair: LoraPair, form: PairForm, in_features: int, out: int) -> tuple[int, Factor, Factor]:
    """Rank and factors of a 2-D pair that belongs to one module (or to one expert)."""
    a, b = pair.a.shape, pair.b.shape
    if form is PairForm.EMBEDDING:
        # A is [rank, vocabulary] in the file; the payload has a row for each token.
        _expect(len(a) == 2 and a[1] == in_features, "A", a, f"[rank, {in_features}]")
        _expect(len(b) == 2 and b[0] == out, "B", b, f"[{out}, rank]")
        _expect_rank(a[0], b[1])
        return a[0], Factor(pair.a, (0, 1, in_features)), Factor(pair.b, (0, a[0], 1))
    _expect(len(a) == 2 and a[1] == in_features, "A", a, f"[rank, {in_features}]")
    _expect(len(b) == 2 and b[0] == out, "B", b, f"[{out}, rank]")
    _expect_rank(a[0], b[1])
    return a[0], Factor(pair.a, (0, in_features, 1)), Factor(pair.b, (0, a[0], 1))


def stacked_factors(pair: LoraPair, site: LoraSite, out: int) -> tuple[int, Factor, Factor]:
    """Rank and factors of a 3-D pair; one of 1 expert is shared by all."""
    a, b, n = pair.a.shape, pair.b.shape, site.num_experts
    width = site.in_features
    _expect(len(a) == 3 and a[0] in (1, n) and a[2] == width, "A", a, f"[1 or {n}, rank, {width}]")
    _expect(len(b) == 3 and b[0] in (1, n) and b[1] == out, "B", b, f"[1 or {n}, {out}, rank]")
    _expect_rank(a[1], b[2])
    rank = a[1]
    stride_a = rank * width if a[0] == n else 0
    stride_b = out * rank if b[0] == n else 0
    return rank, Factor(pair.a, (stride_a, width, 1)), Factor(pair.b, (stride_b, rank, 1))


def fused_rank(pair: LoraPair, site: LoraSite) -> int:
    """The rank of PEFT's packed pair: lora_A has E * rank rows, lora_B rank * E columns."""
    a, b, n = pair.a.shape, pair.b.shape, site.num_experts
    _expect(len(a) == 2 and a[0] % n == 0, "A", a, f"[{n} experts * rank, width]")
    _expect(len(b) == 2 and b[1] == a[0], "B", b, f"[width, {a[0]}]")
    return a[0] // n


def fused_factors(
    pair: LoraPair, rank: int, num_experts: int, packing: ExpertPacking, orientation: ExpertOrientation
) -> tuple[Factor, Factor]:
    """Factors of PEFT's packed pair, whose widths have been checked.

    lora_A [E*r, width] has row e*r + j. lora_B [width, r*E] has column j*E + e as PEFT writes it, or e*r + j.
    Standard: they are A and B. Exchanged: y += s A_e^T (B_e^T x), so B_e^T is the canonical A, A_e^T the B.
    """
    width_a = pair.a.shape[1]
    row_b = rank * num_experts
    # Strides along (expert, rank, the long axis) of either tensor.
    e_a, j_a, w_a = rank * width_a, width_a, 1
    e_b, j_b, w_b = (1, num_experts, row_b) if packing is ExpertPacking.RANK_MAJOR else (rank, 1, row_b)
    if orientation is ExpertOrientation.STANDARD:
        return Factor(pair.a, (e_a, j_a, w_a)), Factor(pair.b, (e_b, w_b, j_b))
    return Factor(pair.b, (e_b, j_b, w_b)), Factor(pair.a, (e_a, w_a, j_a))


def _expect(condition: bool, side: str, shape: tuple[int, ...], expected: str) -> None:
    if not condition:
        raise ShapeMismatchError(f"lora_{side} has shape {list(shape)}, expected {expected}")


def _expect_rank(rank_a: int, rank_b: int) -> None:
    if rank_a != rank_b:
        raise ShapeMismatchError(f"lora_A has rank {rank_a}, lora_B has rank {rank_b}")
