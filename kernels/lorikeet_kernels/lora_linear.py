"""lora_linear: out += B A x for dense projections; fused ones (q, k, v) as one op over several sites.

    out[t, columns of site j] += B_j @ (A_j @ x[t]),   weights those of slot(t)

x [T, in]; A_j [num_a * R, in] and B_j [out_j, R] in the arena, scaling included. The sites' columns lie side by side
in out [T, sum out_j]. Where num_slices[j] is 2 and num_a is 2, the first half of site j's columns uses A's first R
rows and the second half the others. The rank vector stays float32; out is updated in place, rounded once; rows of
slot -1 and columns of a site with rank 0 keep their bits.
"""

import torch

from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import add_rounded, site_a, site_b, site_rank


def lora_linear_reference(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...] | None = None,
) -> None:
    """The op on CPU: per slot segment and site, float32 matmuls."""
    _check(out, x, segments, tables, sites, out_features, num_slices)
    indptr = segments.indptr.tolist()
    for slot in range(segments.num_slots):
        start, end = indptr[slot + 1], indptr[slot + 2]
        if start == end:
            continue
        tokens = segments.order[start:end].to(torch.int64)
        rows = x.index_select(0, tokens).to(torch.float32)
        column = 0
        for site, width in zip(sites, out_features, strict=True):
            if site_rank(tables, slot, site) > 0:
                _add_site(out, rows, tokens, tables, slot, site, column, width)
            column += width


def _add_site(
    out: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    tables: LoraTables,
    slot: int,
    site: int,
    column: int,
    width: int,
) -> None:
    a = site_a(tables, slot, site, rows.shape[1]).to(torch.float32)
    b = site_b(tables, slot, site, width).to(torch.float32)
    part = width // a.shape[0]
    for index in range(a.shape[0]):
        delta = (rows @ a[index].T) @ b[index * part : (index + 1) * part].T
        start = column + index * part
        add_rounded(out, tokens, slice(start, start + part), delta)


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...] | None,
) -> None:
    num_tokens = segments.token_slot.shape[0]
    if out.shape != (num_tokens, sum(out_features)) or x.shape[0] != num_tokens:
        raise ValueError(
            f"out {tuple(out.shape)} and x {tuple(x.shape)} must have {num_tokens} rows, and out"
            f" {sum(out_features)} columns, the sum of out_features {out_features}"
        )
    if len(sites) != len(out_features) or (num_slices is not None and len(num_slices) != len(sites)):
        raise ValueError(
            f"sites {sites}, out_features {out_features} and num_slices {num_slices} differ in length"
        )
    if not out.dtype == x.dtype == tables.arena.dtype:
        raise ValueError(
            f"out {out.dtype}, x {x.dtype} and arena {tables.arena.dtype} differ: all carry the compute dtype"
        )


lora_linear = lora_linear_reference
