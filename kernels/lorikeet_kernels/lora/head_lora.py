"""LoRA on a projection that is applied to each head by itself, before or after attention.

    up:    out[t, h] += B_h (A x[t, h])        A [R, in],    B_h rows of B [H * stride, R]
    down:  out[t, h] += A^T (B_h^T x[t, h])    A [R, out],   B_h likewise

A latent layer's up-projection W [H * (plain + value), latent] has an adapter, W + B A. Where W_h is absorbed
into queries and applied to sums, these two do the same with the adapter's part, and exactly:
(W_h + B_h A)^T q = W_h^T q + A^T (B_h^T q), and (W_h + B_h A) u = W_h u + B_h (A u). A request's cached
latents all belong to its own adapter, so a query's adapter is that of every latent which it meets.

Shapes: x [T, H, in] and out [T, H, out], views whose last dimension is contiguous; A and B as the arena has
them, scaling included. The rank vector stays float32; out is updated in place and rounded once; rows of slot
-1 and of slots without the site keep their bits.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's branches on constants are statements.
# ruff: noqa: SIM108

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.exact_dot import dot_exact
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import site_a, site_b, site_rank
from lorikeet_kernels.lora.site_lookup import find_site

MIN_ROWS = 16  # of a tl.dot
BLOCK_K, BLOCK_N = 64, 128
WIDE_RANK_BYTES = 256  # of a rank vector in the compute dtype: beyond, tiles ahead would fill shared memory
FEW_PROGRAMS = 128


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Head h has `count` rows of B, from h * stride + first on."""

    stride: int
    first: int
    count: int

    def check(self, x: torch.Tensor, out: torch.Tensor, *, down: bool) -> None:
        """Raise ValueError unless B's rows are such heads' inputs with `down`, else their outputs."""
        fits = 0 <= self.first <= self.first + self.count <= self.stride
        if not fits or self.count != (x if down else out).shape[-1]:
            raise ValueError(f"{self} do not fit x {tuple(x.shape)} and out {tuple(out.shape)}, {down=}")


def head_lora_reference(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    rows: HeadRows,
    *,
    down: bool,
) -> None:
    """The op on CPU: per slot segment, float32 products."""
    heads = x.shape[1]
    shared = out.shape[-1] if down else x.shape[-1]
    indptr = segments.indptr.tolist()
    for slot in range(segments.num_slots):
        start, end = indptr[slot + 1], indptr[slot + 2]
        if start == end or site_rank(tables, slot, site) == 0:
            continue
        tokens = segments.order[start:end].to(torch.int64)
        a = site_a(tables, slot, site, shared)[0, 0].float()
        b = site_b(tables, slot, site, heads * rows.stride)[0].view(heads, rows.stride, -1)
        b = b[:, rows.first : rows.first + rows.count].float()  # [H, count, R]
        own = x.index_select(0, tokens).float().transpose(0, 1)  # [H, n, in]
        delta = torch.bmm(own, b) @ a if down else torch.bmm(own @ a.T, b.transpose(1, 2))
        total = out.index_select(0, tokens).float() + delta.transpose(0, 1)
        out.index_copy_(0, tokens, total.to(out.dtype))


def shares_columns(num_blocks: int, heads: int) -> bool:
    """Whether programs are so few that each takes a tile of columns, with a rank vector of its own."""
    return num_blocks * heads < FEW_PROGRAMS


@triton.jit(do_not_specialize=["site", "num_sites"], do_not_specialize_on_alignment=["site", "num_sites"])
def _head_lora_kernel(
    out_ptr, x_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr, pairs_ptr,
    blocks_ptr, num_blocks_ptr, site, num_sites, stride_ot, stride_oh, stride_xt, stride_xh,
    K: tl.constexpr, N: tl.constexpr, HEAD_ROWS: tl.constexpr, FIRST: tl.constexpr, DOWN: tl.constexpr,
    BY_TOKEN: tl.constexpr, SPAN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, RANK_P2: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    if BY_TOKEN:
        slot = tl.load(token_slot_ptr + block)
        inside = m < 1
        token = block + tl.zeros([BLOCK_M], tl.int32)
    else:
        left = tl.load(blocks_ptr + block * 4 + 1)
        slot = tl.load(blocks_ptr + block * 4 + 3)
        if block >= tl.load(num_blocks_ptr):
            return  # beyond the last block the entry read above is arbitrary, but within bounds
        inside = m < left
        token = tl.load(pairs_ptr + block * BLOCK_M + m, mask=inside, other=0)
    a_start, rank, _ = find_site(a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, 0, 0)
    if rank == 0:
        return
    b_start, _, _ = find_site(b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, 0, 0)
    a_at = arena_ptr + a_start
    b_at = arena_ptr + b_start + (head * HEAD_ROWS + FIRST).to(tl.int64) * rank
    r = tl.arange(0, RANK_P2)
    x_row = x_ptr + token.to(tl.int64) * stride_xt + head * stride_xh
    h = tl.zeros([BLOCK_M, RANK_P2], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row[:, None] + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        if DOWN:
            at = b_at + k[:, None] * rank + r[None, :]
        else:
            at = a_at + r[None, :] * K + k[:, None]
        shrink = tl.load(at, mask=(k < K)[:, None] & (r < rank)[None, :], other=0.0)
        h = tl.dot(x, shrink, h, input_precision="ieee")
    out_row = out_ptr + token.to(tl.int64) * stride_ot + head * stride_oh
    for step in range(SPAN):
        n = (tl.program_id(2) * SPAN + step) * BLOCK_N + tl.arange(0, BLOCK_N)
        if DOWN:
            at = a_at + r[:, None] * N + n[None, :]
        else:
            at = b_at + n[None, :] * rank + r[:, None]
        expand = tl.load(at, mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
        place = out_row[:, None] + n[None, :]
        mask = inside[:, None] & (n < N)[None, :]
        before = tl.load(place, mask=mask, other=0.0)
        y = dot_exact(h, expand, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        tl.store(place, (before.to(tl.float32) + y).to(out_ptr.dtype.element_ty), mask=mask)


def add_head_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    rows: HeadRows,
    *,
    down: bool,
) -> None:
    """Launch, over blocks of a slot's tokens where the step has them; what the interpreter tests."""
    num_tokens, heads, in_features = x.shape
    blocks, out_features = segments.blocks, out.shape[-1]
    by_token = blocks is None
    rows_of_tokens = segments.token_slot
    pairs, described, counted = (
        (rows_of_tokens,) * 3 if blocks is None else (blocks.pairs, blocks.blocks, blocks.num_blocks)
    )
    num_blocks = num_tokens if blocks is None else blocks.capacity
    rank_p2 = max(16, triton.next_power_of_2(tables.max_rank))
    is_wide = rank_p2 * x.itemsize > WIDE_RANK_BYTES
    # products of float32 are no tensor core's: their tiles lie in registers
    narrower = (1 if not is_wide else 2) * (x.itemsize // 2)
    block_k, block_n = max(16, BLOCK_K // narrower), BLOCK_N // narrower
    column_tiles = triton.cdiv(out_features, block_n)
    parts = column_tiles if shares_columns(num_blocks, heads) else 1
    _head_lora_kernel[(num_blocks, heads, parts)](
        out, x, tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a, rows_of_tokens,
        pairs, described, counted, site, tables.rank.shape[1],
        out.stride(0), out.stride(1), x.stride(0), x.stride(1),
        K=in_features, N=out_features, HEAD_ROWS=rows.stride, FIRST=rows.first, DOWN=down, BY_TOKEN=by_token,
        SPAN=column_tiles // parts, BLOCK_M=MIN_ROWS if blocks is None else blocks.block_m,
        BLOCK_K=min(block_k, max(16, triton.next_power_of_2(in_features))), BLOCK_N=block_n, RANK_P2=rank_p2,
        num_warps=4, num_stages=1 if is_wide else 3,
    )  # fmt: skip


def head_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    rows: HeadRows,
    *,
    down: bool,
) -> None:
    """Add the adapters' part to `out`; the reference on CPU."""
    num_tokens = segments.token_slot.shape[0]
    if out.shape[:2] != x.shape[:2] or x.shape[0] != num_tokens:
        raise ValueError(
            f"head_lora: out {tuple(out.shape)} and x {tuple(x.shape)} must have {num_tokens} rows and "
            "as many heads as each other"
        )
    rows.check(x, out, down=down)
    tables.check_sites(site)
    if out.stride(2) != 1 or x.stride(2) != 1:
        raise ValueError(f"head_lora: a head must be contiguous, strides {out.stride()} and {x.stride()}")
    if not out.dtype == x.dtype == tables.arena.dtype:
        raise ValueError(
            f"head_lora: out {out.dtype}, x {x.dtype} and arena {tables.arena.dtype} differ: all carry the "
            "compute dtype"
        )
    if num_tokens == 0:
        return
    if x.device.type == "cpu":
        head_lora_reference(out, x, segments, tables, site, rows, down=down)
        return
    add_head_lora(out, x, segments, tables, site, rows, down=down)
