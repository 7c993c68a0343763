"""Latent attention whose latents pass a ring of TMA copies: the decode and the prefill kernel, in Gluon.

The same programs as those of `latent_decode` and `latent_prefill`, which launch these where tiles say so.
"""

# A Gluon kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Triton takes no keyword in a nested call of many constants.
# ruff: noqa: FBT003

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lorikeet_kernels.attention.latent_ring import PANEL, STEP, scan_ring
from lorikeet_kernels.launch.grid_dependency import launch_next_grid
from lorikeet_kernels.tiling.latent_tiles import SHARED_BYTES, most_ring_bytes

# Of a program's rows. With them ptxas spills nothing, in a kernel whose copying warps give most of theirs to
# those that multiply; two programs of 16 rows fit a multiprocessor.
REGISTERS = {16: 128, 32: 160, 64: 168}


@gluon.jit(
    do_not_specialize=["stride_table", "splits"],
    do_not_specialize_on_alignment=["stride_table", "splits"],
)
def _ring_decode_kernel(
    out_ptr, parts_ptr, q_ptr, rows, starts_ptr, lens_ptr, tables_ptr,
    stride_qt, stride_table, splits, scale_log2,
    HEADS: gl.constexpr, ROWS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, IS_SPLIT: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        launch_next_grid()
    HEAD_TILES: gl.constexpr = (HEADS + ROWS - 1) // ROWS
    GROUPS: gl.constexpr = WARPS // 4
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, ROWS // GROUPS, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [4, GROUPS], [0, 1])
    # tiles of one request lie side by side: the second one finds the latents in the L2
    request = gl.program_id(0) // HEAD_TILES
    first_head = (gl.program_id(0) % HEAD_TILES) * ROWS
    split = gl.program_id(1)
    token = gl.load(starts_ptr + request)
    is_decode = gl.load(starts_ptr + request + 1) - token == 1
    # of a request with another number of queries nothing is read nor stored, but all warps end together
    length = gl.where(is_decode, gl.load(lens_ptr + request), 0)
    num_steps = (length + STEP - 1) // STEP
    begin = (num_steps * split // splits) * STEP
    end = (num_steps * (split + 1) // splits) * STEP
    head = first_head + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    position = first_head + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORE))
    acc, largest, total = scan_ring(
        q_ptr + token.to(gl.int64) * stride_qt + head * (LATENT + ROPE), (head < HEADS) & is_decode, position,
        begin, end, length, rows, tables_ptr + request.to(gl.int64) * stride_table, scale_log2,
        ROWS, LATENT, ROPE, BLOCK_TOKENS, False, STAGES, KEY_STAGES, WARPS, LOADED, SCORE, ACC,
    )  # fmt: skip
    acc = gl.convert_layout(acc, STORED)
    d = gl.arange(0, LATENT, layout=gl.SliceLayout(1, STORED))[:, None]
    to = first_head + gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    is_row = (to < HEADS) & is_decode
    if IS_SPLIT:
        # as latent_decode's parts: [heads, LATENT] sums, then [heads] largest scores, then [heads] totals
        part = parts_ptr + (request * splits + split).to(gl.int64) * (HEADS * (LATENT + 2))
        gl.store(part + to[None, :] * LATENT + d, acc, mask=is_row[None, :])
        mask = (position < HEADS) & is_decode
        gl.store(part + HEADS * LATENT + position, largest, mask=mask)
        gl.store(part + HEADS * (LATENT + 1) + position, total, mask=mask)
    else:
        total = gl.convert_layout(total, gl.SliceLayout(0, STORED))
        y = acc / gl.maximum(total, 1e-30)[None, :]  # a request without keys, which pads a batch, gives 0
        out_at = out_ptr + (token.to(gl.int64) * HEADS + to)[None, :] * LATENT + d
        gl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


@gluon.jit
def _find_queries(starts_ptr, tile, num_requests, BLOCK_Q: gl.constexpr):
    """As `latent_prefill.find_queries`."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    row = gl.load(starts_ptr + low)
    num_queries = gl.load(starts_ptr + low + 1) - row
    return low, row, num_queries, (tile - (row // BLOCK_Q + low)) * BLOCK_Q


@gluon.jit(
    do_not_specialize=["num_requests", "stride_table", "most_fresh"],
    do_not_specialize_on_alignment=["num_requests", "stride_table", "most_fresh"],
)
def _ring_prefill_kernel(
    out_ptr, q_ptr, rows, starts_ptr, lens_ptr, tables_ptr, num_requests, most_fresh,
    stride_qt, stride_table, scale_log2,
    HEADS: gl.constexpr, HEADS_P2: gl.constexpr, BLOCK_Q: gl.constexpr, LATENT: gl.constexpr,
    ROPE: gl.constexpr, BLOCK_TOKENS: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_Q * HEADS_P2
    GROUPS: gl.constexpr = WARPS // 4
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, ROWS // GROUPS, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [4, GROUPS], [0, 1])
    # later tiles see more keys: they go first, so that the short ones fill the end
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    request, first_row, num_queries, first_query = _find_queries(starts_ptr, tile, num_requests, BLOCK_Q)
    length = gl.load(lens_ptr + request)
    is_served = (first_query < num_queries) & (num_queries >= 2)
    is_served = is_served & ((num_queries != length) | (num_queries <= most_fresh))
    first_position = length - num_queries
    # without queries nothing is read nor stored, but all warps end together
    end = gl.where(is_served, gl.minimum(first_position + first_query + BLOCK_Q, length), 0)
    first_head = gl.program_id(0) * HEADS_P2
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    query, head = first_query + row // HEADS_P2, first_head + row % HEADS_P2
    q_at = q_ptr + (first_row + query).to(gl.int64) * stride_qt + head * (LATENT + ROPE)
    position = first_position + first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORE)) // HEADS_P2
    acc, _, total = scan_ring(
        q_at, (query < num_queries) & (head < HEADS) & is_served, position, 0, end, length, rows,
        tables_ptr + request.to(gl.int64) * stride_table, scale_log2,
        ROWS, LATENT, ROPE, BLOCK_TOKENS, True, STAGES, KEY_STAGES, WARPS, LOADED, SCORE, ACC,
    )  # fmt: skip
    acc = gl.convert_layout(acc, STORED)
    y = acc / gl.convert_layout(total, gl.SliceLayout(0, STORED))[None, :]
    d = gl.arange(0, LATENT, layout=gl.SliceLayout(1, STORED))[:, None]
    to = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    to_query, to_head = first_query + to // HEADS_P2, first_head + to % HEADS_P2
    out_at = out_ptr + ((first_row + to_query).to(gl.int64) * HEADS + to_head)[None, :] * LATENT + d
    is_row = (to_query < num_queries) & (to_head < HEADS) & is_served
    gl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


def can_ring(cache: torch.Tensor, latent_dim: int, q_dtype: torch.dtype, *, on_hopper: bool) -> bool:
    """Whether a cache is as the ring's copies and products take it; DeepSeek's are, in 16 bits on Hopper."""
    block_tokens, width = cache.shape[1], cache.shape[3]
    return (
        on_hopper  # other generations' compilers do not know the instructions, and abort the process
        and cache.element_size() == 2
        and cache.dtype == q_dtype
        and cache.is_contiguous()
        and STEP.value % block_tokens == 0
        and block_tokens >= 8
        and latent_dim in (128, 256, 512)
        and width - latent_dim in (64, 128)
        and most_ring_bytes(latent_dim, width) <= SHARED_BYTES
    )


def _describe(cache: torch.Tensor) -> TensorDescriptor:
    """The cache as rows, of which a copy takes a page's panel."""
    block_tokens, width = cache.shape[1], cache.shape[3]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(cache.view(-1, width), [block_tokens, PANEL.value], layout)


def ring_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale_log2: float,
    out: torch.Tensor,
    parts: torch.Tensor,
    *,
    rows: int,
    splits: int,
    num_warps: int,
    num_stages: int,
    num_key_stages: int,
) -> None:
    """Launch: `out`'s rows of decodes, or with several splits their `parts`."""
    heads, latent_dim = q.shape[1], out.shape[-1]
    _ring_decode_kernel[(sequence_lens.shape[0] * -(-heads // rows), splits)](
        out, parts, q, _describe(cache), query_starts, sequence_lens, block_tables,
        q.stride(0), block_tables.stride(0), splits, scale_log2,
        HEADS=heads, ROWS=rows, LATENT=latent_dim, ROPE=cache.shape[3] - latent_dim,
        BLOCK_TOKENS=cache.shape[1], IS_SPLIT=splits > 1, STAGES=num_stages, KEY_STAGES=num_key_stages,
        WARPS=num_warps, PDL=q.device.type == "cuda", num_warps=num_warps, maxnreg=REGISTERS[rows],
    )  # fmt: skip


def ring_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale_log2: float,
    out: torch.Tensor,
    *,
    heads_p2: int,
    block_q: int,
    num_warps: int,
    num_stages: int,
    num_key_stages: int,
    most_fresh: int,
) -> None:
    """Launch: `out`'s rows of requests with several queries."""
    heads, latent_dim, num_requests = q.shape[1], out.shape[-1], sequence_lens.shape[0]
    _ring_prefill_kernel[(-(-heads // heads_p2), q.shape[0] // block_q + num_requests)](
        out, q, _describe(cache), query_starts, sequence_lens, block_tables, num_requests, most_fresh,
        q.stride(0), block_tables.stride(0), scale_log2,
        HEADS=heads, HEADS_P2=heads_p2, BLOCK_Q=block_q, LATENT=latent_dim, ROPE=cache.shape[3] - latent_dim,
        BLOCK_TOKENS=cache.shape[1], STAGES=num_stages, KEY_STAGES=num_key_stages, WARPS=num_warps,
        num_warps=num_warps, maxnreg=REGISTERS[heads_p2 * block_q],
    )  # fmt: skip
