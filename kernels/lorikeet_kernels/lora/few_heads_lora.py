"""A projection of heads of few rows and its adapters in one launch, before or after attention.

    down:  out[t, h] = x[t, h] W[h] + A^T (B_h^T x[t, h])
    up:    out[t, h] = x[t, h] W[h] + B_h (A x[t, h])

Shapes and names as in `head_lora`, W as in `head_linear`, all of 16 bits. The rank vector and the sum stay
float32: out is rounded once. Rows without an adapter have the bits of `few_heads_linear`: these are its
programs, each of which makes its row's rank vector for itself. They are 2 to 16 KB of reads from the
L2, on their way with W before the launch before ends, where a second launch takes 4.5 us.

Floor: the bytes of W and of the adapters at 4.3 TB/s. Predicted: 0.3 us more than the projection by itself.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.few_heads_linear import (
    check_few_heads,
    few_heads_constants,
    few_heads_grid,
    head_place,
    head_sums,
    load_head,
    load_head_tile,
    takes_heads,
)
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.head_lora import HeadRows
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.site_lookup import find_site
from lorikeet_kernels.tiling.few_heads_tiles import FewHeadsTiles, select_few_heads, takes_few_heads

MAX_JOINED_RANK = 32
"""Beyond, rank vectors of 512 inputs spill."""
MAX_SCANNED_SLOTS = 32


@triton.jit
def _load_adapter(
    arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, head, n,
    IN: tl.constexpr, IN_P2: tl.constexpr, OUT: tl.constexpr, HEAD_ROWS: tl.constexpr, FIRST: tl.constexpr,
    DOWN: tl.constexpr, RANK_P2: tl.constexpr, SLOT_SCAN: tl.constexpr,
):  # fmt: skip
    """(what makes the rank vector [IN_P2, RANK_P2], what takes it to columns n [RANK_P2, COLUMNS], rank).

    Summed along their first axis, the weight along its last: else the compiler would lay out one like another
    and add up rows of the base model in another order than without adapters.
    """
    a, rank, _ = find_site(a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, SLOT_SCAN)
    b, _, _ = find_site(b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, SLOT_SCAN)
    a_at = arena_ptr + a
    b_at = arena_ptr + b + (head * HEAD_ROWS + FIRST).to(tl.int64) * rank
    k = tl.arange(0, IN_P2)
    r = tl.arange(0, RANK_P2)
    if DOWN:
        shrink_at = b_at + k[:, None] * rank + r[None, :]
        expand_at = a_at + r[:, None] * OUT + n[None, :]
    else:
        shrink_at = a_at + r[None, :] * IN + k[:, None]
        expand_at = b_at + n[None, :] * rank + r[:, None]
    shrink = tl.load(shrink_at, mask=(k < IN)[:, None] & (r < rank)[None, :], other=0.0)
    expand = tl.load(expand_at, mask=(r < rank)[:, None] & (n < OUT)[None, :], other=0.0)
    return shrink, expand, rank


# each number of rows has strides of its own
@triton.jit(
    do_not_specialize=["stride_ot", "stride_xt", "site", "num_sites", "num_slots"],
    do_not_specialize_on_alignment=["stride_ot", "stride_xt", "site", "num_sites", "num_slots"],
)
def _few_heads_lora_kernel(
    out_ptr, x_ptr, weight_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr,
    stride_ot, stride_xt, site, num_sites, num_slots,
    STRIDE_OH: tl.constexpr, STRIDE_XH: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_K: tl.constexpr,
    STRIDE_N: tl.constexpr, IN: tl.constexpr, IN_P2: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr,
    HEAD_ROWS: tl.constexpr, FIRST: tl.constexpr, DOWN: tl.constexpr, RANK_P2: tl.constexpr,
    SLOT_SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, head, n = head_place(OUT, COLUMNS)
    weight = load_head_tile(weight_ptr, head, n, STRIDE_H, STRIDE_K, STRIDE_N, IN, IN_P2, OUT)
    shrink, expand, rank = _load_adapter(
        arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, tl.load(token_slot_ptr + token), site,
        num_sites, num_slots, head, n, IN, IN_P2, OUT, HEAD_ROWS, FIRST, DOWN, RANK_P2, SLOT_SCAN,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = load_head(x_ptr, token, head, stride_xt, STRIDE_XH, IN, IN_P2)
    y = head_sums(x, weight)
    h = tl.sum(shrink.to(tl.float32) * x[:, None], axis=0)
    delta = tl.sum(expand.to(tl.float32) * h[:, None], axis=0)
    y = tl.where(rank > 0, y + delta, y)
    out_at = out_ptr + token.to(tl.int64) * stride_ot + head * STRIDE_OH + n
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=n < OUT)


def few_heads_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    rows: HeadRows,
    tiles: FewHeadsTiles,
    *,
    down: bool,
) -> None:
    """Launch: `out` becomes the projections with their adapters; see this module's docstring.

    Weights, tables and `segments` are read while the launch before still runs.
    """
    check_few_heads(x, weight, out)
    rows.check(x, out, down=down)
    tables.check_sites(site)
    if segments.token_slot.shape[0] != x.shape[0] or tables.arena.dtype != x.dtype:
        raise ValueError(
            f"few_heads_lora: x {tuple(x.shape)}, {x.dtype}, is of another batch than the segments or of "
            f"another dtype than the arena, {tables.arena.dtype}"
        )
    num_slots, num_sites = tables.rank.shape
    pdl = x.device.type == "cuda"
    _few_heads_lora_kernel[few_heads_grid(x, weight, tiles)](
        out, x, weight, tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a,
        segments.token_slot, out.stride(0), x.stride(0), site, num_sites, num_slots,
        **few_heads_constants(x, weight, out, tiles), HEAD_ROWS=rows.stride, FIRST=rows.first, DOWN=down,
        RANK_P2=triton.next_power_of_2(tables.max_rank),
        SLOT_SCAN=triton.next_power_of_2(num_slots) if num_slots <= MAX_SCANNED_SLOTS else 0, PDL=pdl,
        num_warps=tiles.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def joined_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    rows: HeadRows,
    *,
    down: bool,
) -> bool:
    """Whether one launch made the projections with their adapters; where not, nothing is done."""
    if x.device.type == "cpu" or not takes_few_heads(x.shape[0], device_name(x)):
        return False
    if tables.max_rank > MAX_JOINED_RANK or not takes_heads(x, weight, out):
        return False
    tiles = select_few_heads(*weight.shape[1:])
    few_heads_lora(x, weight, out, segments, tables, site, rows, tiles, down=down)
    return True
