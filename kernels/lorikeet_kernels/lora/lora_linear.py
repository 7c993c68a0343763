"""lora_linear: out += B A x for dense projections; fused ones (q, k, v) as one op over several sites.

    out[t, columns of site j] += B_j @ (A_j @ x[t]),   weights those of slot(t)

x [T, in]; A_j [num_a * R, in] and B_j [out_j, R] in the arena, scaling included. The sites' columns lie side
by side in out [T, sum out_j]. Where num_slices[j] is 2 and num_a is 2, the first half of site j's columns
uses A's first R rows and the second half the others. The rank vector stays float32; out is updated in place,
rounded once; rows of slot -1 and columns of a site with rank 0 keep their bits.

Without `accumulate` out is float32 and becomes the delta alone, unrounded, and NO_DELTA where there is none:
so that whoever adds it to what a base GEMM made meanwhile, and rounds, gets the same bits as above.
"""

import torch
from torch.nn import functional as F

from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.grouped_expand import grouped_expand
from lorikeet_kernels.lora.grouped_shrink import grouped_shrink
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import add_rounded, site_a, site_b, site_rank
from lorikeet_kernels.lora.no_delta import NO_DELTA
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.lora.register_segments import register_segments
from lorikeet_kernels.lora.segment_lora import segment_lora
from lorikeet_kernels.tiling import (
    OpShape,
    RegisterTiles,
    is_segmented,
    select_expand,
    select_pair,
    select_segment,
    select_shrink,
    select_wide_segment,
)


def lora_linear_reference(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...] | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """The op on CPU: per slot segment and site, float32 matmuls."""
    del num_slices  # num_a says the same
    if not accumulate:
        out.fill_(NO_DELTA)
    indptr = segments.indptr.tolist()
    for slot in range(segments.num_slots):
        start, end = indptr[slot + 1], indptr[slot + 2]
        if start == end:
            continue
        tokens = segments.order[start:end].to(torch.int64)
        rows = x.index_select(0, tokens).float()
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
    a = site_a(tables, slot, site, rows.shape[1])[0].float()
    b = site_b(tables, slot, site, width)[0].float()
    part = width // a.shape[0]
    for index, a_part in enumerate(a.unbind()):
        delta = F.linear(F.linear(rows, a_part), b[index * part : (index + 1) * part])
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
    out_dtype: torch.dtype,
) -> None:
    num_tokens = segments.token_slot.shape[0]
    if out.shape != (num_tokens, sum(out_features)) or x.shape[0] != num_tokens:
        raise ValueError(
            f"out {tuple(out.shape)} and x {tuple(x.shape)} must have {num_tokens} rows, and out"
            f" {sum(out_features)} columns, the sum of out_features {out_features}"
        )
    tables.check_sites(*sites)
    if not out.is_contiguous() or not x.is_contiguous():
        raise ValueError(f"out strides {out.stride()} and x strides {x.stride()}: both must be contiguous")
    if len(sites) != len(out_features) or (num_slices is not None and len(num_slices) != len(sites)):
        raise ValueError(
            f"sites {sites}, out_features {out_features} and num_slices {num_slices} differ in length"
        )
    if x.dtype != tables.arena.dtype or out.dtype != out_dtype:
        raise ValueError(
            f"out {out.dtype}, x {x.dtype} and arena {tables.arena.dtype}: all carry the compute dtype, but"
            " float32 the out that receives the delta alone"
        )


def lora_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...] | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """Launch: one kernel at decode, a grouped shrink and expand at prefill, the reference on CPU.

    With `accumulate` the kernels of decode read weights, tables and `segments` while the launch before them
    still runs.
    """
    _check(
        out, x, segments, tables, sites, out_features, num_slices, x.dtype if accumulate else torch.float32
    )
    if x.shape[0] == 0:
        return
    if x.device.type == "cpu":
        lora_linear_reference(
            out, x, segments, tables, sites, out_features, num_slices, accumulate=accumulate
        )
        return
    slices = num_slices or (1,) * len(sites)
    lanes = site_lanes(out_features, slices)
    device = device_name(x)
    shape = OpShape("linear", x.shape[1], out.shape[1], tables.max_rank, x.shape[0])
    if segments.blocks is None:
        tiles = select_pair(shape, device)
        pair_lora(
            out, x, segments.token_slot, None, None, tables, sites, lanes, tiles, segments.workspace,
            accumulate=accumulate,
        )  # fmt: skip
        return
    if is_segmented(x.shape[0], segments.blocks.capacity, tables.max_rank):
        segment_tiles = select_segment(shape, device)
        if x.element_size() == 2 and isinstance(segment_tiles, RegisterTiles):
            register_segments(
                out, x, segments.blocks, tables, sites, lanes, segment_tiles, segments.workspace,
                accumulate=accumulate,
            )  # fmt: skip
            return
        tiles = select_wide_segment(shape, device)
        segment_lora(
            out, x, segments.blocks, tables, sites, lanes, tiles, segments.workspace, accumulate=accumulate
        )
        return
    if not accumulate:
        out.fill_(NO_DELTA)
    shrink_tiles = select_shrink(shape, segments.blocks.block_m, device)
    h = torch.empty(
        (shrink_tiles.splits, x.shape[0], len(sites), max(slices), tables.max_rank),
        dtype=torch.float32,
        device=x.device,
    )
    padded = tables.padded_sites(sites)
    grouped_shrink(h, x, segments.blocks, tables, padded, shrink_tiles, x_div=1)
    expand_tiles = select_expand(shape, segments.blocks.block_m, device)
    grouped_expand(out, h, None, segments.blocks, tables, padded, lanes, expand_tiles, accumulate=accumulate)
