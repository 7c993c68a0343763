"""What to copy where: the canonical payload of an adapter, planned from the headers alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapter_manager.domain.problems import Problem, Problems
from adapter_manager.domain.safetensors_header import TensorEntry
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.weight_piece import Factor, WeightPiece
from lorikeet_contract.manifest import PayloadDtype, padded_rank
from lorikeet_contract.schema import LoraSchema, LoraSite, RowOrder

_DTYPES = {"BF16": PayloadDtype.BFLOAT16, "F16": PayloadDtype.FLOAT16}


@dataclass(frozen=True, slots=True)
class FactorCopy:
    """Copy a factor into a canonical tensor [groups, rows, columns].

    It fills `extents` = (groups, rows, columns) from `group`, `row`, column 0 on, every `row_step`th row.
    `scale` is what the node multiplies these elements by (1 for A).
    """

    source: Factor
    extents: tuple[int, int, int]
    group: int
    row: int
    row_step: int
    scale: float


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One site of the payload. What no copy fills is zero."""

    site: LoraSite
    rank: int
    num_a: int
    scales: tuple[float, ...]
    layout: str
    num_tensors: int
    a_copies: tuple[FactorCopy, ...]
    b_copies: tuple[FactorCopy, ...]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The sites of one layer, in the schema's order; `layer` None for those outside the layers."""

    layer: int | None
    sites: tuple[SitePlan, ...]


def plan_layers(
    pieces: Iterable[WeightPiece], schema: LoraSchema, problems: Problems
) -> tuple[LayerPlan, ...]:
    """Join pieces into sites and sites into layers; pieces that overlap are problems."""
    by_site: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        by_site.setdefault(piece.site.name, []).append(piece)
    layers: dict[int | None, list[SitePlan]] = {}
    for site in schema.sites:
        if site_pieces := by_site.get(site.name):
            if problem := _overlap(site_pieces):
                problems.add(Problem.REPEATED, f"{site.name}: {problem}")
            else:
                layers.setdefault(site.layer, []).append(_plan_site(site, site_pieces))
    return tuple(LayerPlan(layer, tuple(sites)) for layer, sites in layers.items())


def payload_dtype(entries: Iterable[TensorEntry]) -> PayloadDtype:
    """The dtype that holds all of them: their own if they agree, else float32, exact for 16-bit ones.

    float64 becomes float32, too: no node computes in more.
    """
    found = {entry.dtype for entry in entries}
    return _DTYPES.get(found.pop(), PayloadDtype.FLOAT32) if len(found) == 1 else PayloadDtype.FLOAT32


def _overlap(pieces: Sequence[WeightPiece]) -> str:
    """Why the pieces cannot stand side by side; "" where they can."""
    taken: dict[tuple[int | None, int | None], WeightPiece] = {}
    for piece in pieces:
        first = taken.setdefault((piece.slice_index, piece.expert), piece)
        if first is not piece:
            expert = "" if piece.expert is None else f" of expert {piece.expert}"
            names = f"{shown(first.a.entry.name)} and {shown(piece.a.entry.name)}"
            return f"the same weights{expert} are given twice, as {piece.layout}: {names}"
    layouts = sorted({p.layout for p in pieces})
    if len({p.slice_index is None for p in pieces}) > 1:
        return f"fused and separate slices are mixed ({', '.join(layouts)})"
    if len({(p.slice_index, p.expert is None) for p in pieces}) > len({p.slice_index for p in pieces}):
        return f"weights for all experts and for single experts are mixed ({', '.join(layouts)})"
    return ""


def _plan_site(site: LoraSite, pieces: Sequence[WeightPiece]) -> SitePlan:
    rank = max(p.rank for p in pieces)
    slices = sorted({p.slice_index for p in pieces if p.slice_index is not None})
    num_a = max(1, len(slices))
    a_copies, b_copies = list[FactorCopy](), list[FactorCopy]()
    for piece in pieces:
        group = piece.expert or 0
        which_a = 0 if piece.slice_index is None else slices.index(piece.slice_index)
        shape_a = (piece.num_groups, piece.rank, site.in_features)
        if site.kind == "embedding":
            shape_a = (1, site.in_features, piece.rank)
        a_copies.append(FactorCopy(piece.a, shape_a, group, which_a * padded_rank(rank), 1, 1.0))
        row, step = _rows(site, piece.slice_index)
        shape_b = (piece.num_groups, piece.num_rows, piece.rank)
        b_copies.append(FactorCopy(piece.b, shape_b, group, row, step, piece.scale))
    return SitePlan(
        site=site,
        rank=rank,
        num_a=num_a,
        scales=_scales(site, pieces),
        layout="+".join(sorted({p.layout for p in pieces})),
        num_tensors=2 * len(pieces),
        a_copies=tuple(a_copies),
        b_copies=tuple(b_copies),
    )


def _rows(site: LoraSite, slice_index: int | None) -> tuple[int, int]:
    """First row and row step of a slice in B."""
    if slice_index is None:
        return 0, 1
    if site.row_order is RowOrder.INTERLEAVED:
        return slice_index, len(site.slices)
    return sum(s.out_features for s in site.slices[:slice_index]), 1


def _scales(site: LoraSite, pieces: Sequence[WeightPiece]) -> tuple[float, ...]:
    """The shortest form that gives every slice of every expert its scale; absent ones take a neighbour's."""
    num_slices, num_experts = len(site.slices), max(1, site.num_experts)
    grid: list[list[float | None]] = [[None] * num_slices for _ in range(num_experts)]
    for piece in pieces:
        experts = range(num_experts) if piece.expert is None else (piece.expert,)
        columns = range(num_slices) if piece.slice_index is None else (piece.slice_index,)
        for expert in experts:
            for column in columns:
                grid[expert][column] = piece.scale
    default = pieces[0].scale
    by_slice = [next((row[c] for row in grid if row[c] is not None), default) for c in range(num_slices)]
    full = [[by_slice[c] if row[c] is None else row[c] for c in range(num_slices)] for row in grid]
    flat = tuple(float(s) for row in full for s in row if s is not None)
    if len(set(flat)) == 1:
        return flat[:1]
    if all(row == full[0] for row in full):
        return flat[:num_slices]
    return flat
