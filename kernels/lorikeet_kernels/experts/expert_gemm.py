"""Grouped GEMM over 16- or 32-bit experts on a GPU, with what follows it fused.

    v[p] = W[expert] x[row(p)] + bias[expert]
    y[p] = activation(v[p])                    (gate_up: `row_order` says how gate and up rows lie)
    y[p] = topk_weights[p] v[p]                (down)
    part[s, p] = W[expert, columns of split s] x[row(p)]        (down, split; `moe_sum_parts` finishes it)

Shapes: x [T, in] (a token's pairs share its row) or [T, K, in]; weight [E, out, in]; bias [E, out];
topk_weights [T, K] float32; out [T, K, out], [T, K, out / 2] with an activation, or float32 [splits, T, K,
out]; delta [T, K, out]. Accumulates in float32; v rounds to x's dtype before the activation, y rounds once
more: the bits are those of `expert_linear`, `gated_activation` one after the other. With an activation
`delta` is added to v between, and the sum rounded. A pair's result depends on no other pair. The reference is
`expert_linear_reference`.

With `weights_first` a program starts while the launch before it still runs, and has the first `tiles.ahead`
columns of its rows of W fetched to L2 meanwhile: no register waits for them, and no bit depends on it.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.dense.row_order import RowOrder, check_row_order
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.lora.fetch_rows import FETCH
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

_PAIRINGS = {None: 0, "interleaved": 1, "concatenated": 2}


@triton.jit
def _matrix_row(column, OUT: tl.constexpr, PAIRING: tl.constexpr):
    """The matrix's row of an accumulator's column: gate and up alternate there in every row order."""
    if PAIRING == 2:
        return column % 2 * (OUT // 2) + column // 2
    return column


@triton.jit
def _fetch_ahead(
    weight_ptr, expert,
    IN: tl.constexpr, OUT: tl.constexpr, PAIRING: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Start the first AHEAD columns of the program's rows on their way to L2."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUT
    row = tl.where(inside, _matrix_row(column, OUT, PAIRING), 0)
    begin = tl.program_id(2) * SPLIT_COLUMNS
    element_bytes: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    size = tl.where(inside, tl.minimum(AHEAD, IN - begin) * element_bytes, 0)
    place = weight_ptr + (expert * OUT + row) * IN + begin
    tl.inline_asm_elementwise(
        FETCH, "=r,l,r", [place.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _compute(
    out_ptr, x_ptr, weight_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, first, count, expert,
    num_pairs, alpha, limit, up_offset,
    IN: tl.constexpr, OUT: tl.constexpr, X_DIV: tl.constexpr, PAIRING: tl.constexpr, ACTIVATE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTED: tl.constexpr, HAS_DELTA: tl.constexpr,
    SPLITS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, LONE: tl.constexpr,
):  # fmt: skip
    """Up to PAIRS pairs times the program's columns."""
    split = tl.program_id(2)
    m = tl.arange(0, PAIRS)
    is_row = m < count
    # places beyond the block's pairs repeat its first; their rows are never stored
    pair = first + m * 0 if LONE else tl.load(order_ptr + first + tl.where(is_row, m, 0))
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUT
    row = _matrix_row(column, OUT, PAIRING)
    # rows beyond the matrix repeat its first; their columns are never stored
    weight_row = tl.where(inside, row, 0)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (pair // X_DIV).to(tl.int64)[:, None] * IN + k[None, :]
    weight_at = weight_ptr + (expert * OUT + weight_row)[None, :] * IN + k[:, None]
    STEPS: tl.constexpr = (IN + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    begin = split * STEPS
    acc = tl.zeros([PAIRS, BLOCK_N], tl.float32)
    for step in tl.range(begin, begin + STEPS, num_stages=STAGES):
        if IN % (BLOCK_K * SPLITS) == 0:
            x = tl.load(x_at + step * BLOCK_K)
            w = tl.load(weight_at + step * BLOCK_K)
        else:
            in_columns = k + step * BLOCK_K < IN
            x = tl.load(x_at + step * BLOCK_K, mask=in_columns[None, :], other=0.0)
            w = tl.load(weight_at + step * BLOCK_K, mask=in_columns[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * OUT + row, mask=inside, other=0.0).to(tl.float32)
        acc += bias[None, :]
    if ACTIVATE:
        value = acc.to(dtype)
        if HAS_DELTA:
            at = delta_ptr + pair.to(tl.int64)[:, None] * OUT + row[None, :]
            delta = tl.load(at, mask=is_row[:, None] & inside[None, :], other=0.0)
            value = (value.to(tl.float32) + delta.to(tl.float32)).to(dtype)
        gate, up = tl.split(tl.reshape(value.to(tl.float32), [PAIRS, BLOCK_N // 2, 2]))
        if HAS_LIMIT:  # comparisons keep a NaN, minimum and maximum may not
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_offset)
        to = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = out_ptr + pair.to(tl.int64)[:, None] * (OUT // 2) + to[None, :]
        tl.store(at, y.to(dtype), mask=is_row[:, None] & (to < OUT // 2)[None, :])
    else:
        if HAS_ROUTED:
            acc *= tl.load(routed_ptr + pair)[:, None]
        at = out_ptr + (split * num_pairs + pair).to(tl.int64)[:, None] * OUT + row[None, :]
        tl.store(at, acc.to(dtype), mask=is_row[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["num_pairs"])
def _expert_gemm_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, blocks_ptr,
    num_pairs, alpha, limit, up_offset,
    IN: tl.constexpr, OUT: tl.constexpr, X_DIV: tl.constexpr, PAIRING: tl.constexpr, ACTIVATE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTED: tl.constexpr, HAS_DELTA: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, LONE: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    if PDL:
        if not WEIGHTS_FIRST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    if LONE:
        first = block
        count = 1
        expert = tl.load(order_ptr + block).to(tl.int64)
    else:
        first = tl.load(blocks_ptr + block * 4)
        count = tl.load(blocks_ptr + block * 4 + 1)
        expert = tl.load(blocks_ptr + block * 4 + 2).to(tl.int64)
        if count == 0:
            return
    if PDL and WEIGHTS_FIRST:
        if AHEAD > 0:
            SPLIT_COLUMNS: tl.constexpr = (IN + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
            _fetch_ahead(weight_ptr, expert, IN, OUT, PAIRING, BLOCK_N, SPLIT_COLUMNS, AHEAD)
        tl.extra.cuda.gdc_wait()
    if HALVES and count <= BLOCK_M // 2:  # an expert's last block: half the work where half suffices
        _compute(
            out_ptr, x_ptr, weight_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, first, count, expert,
            num_pairs, alpha, limit, up_offset, IN, OUT, X_DIV, PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS,
            HAS_ROUTED, HAS_DELTA, SPLITS, BLOCK_M // 2, BLOCK_N, BLOCK_K, STAGES, LONE,
        )  # fmt: skip
    else:
        _compute(
            out_ptr, x_ptr, weight_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, first, count, expert,
            num_pairs, alpha, limit, up_offset, IN, OUT, X_DIV, PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS,
            HAS_ROUTED, HAS_DELTA, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, LONE,
        )  # fmt: skip


def expert_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    row_order: RowOrder | None = None,
    delta: torch.Tensor | None = None,
    weights_first: bool = False,
) -> torch.Tensor:
    """Write every pair's result into `out` and return it; see this module's docstring.

    `weights_first` only where the launch before started after the making of `blocks` had ended: another of
    this op over them, or what follows one.
    """
    _check(x, weight, blocks, out, tiles, activation, row_order)
    if blocks.capacity == 0:
        return out
    constants = activation or GatedActivation()
    limit = constants.limit
    out_features = weight.shape[1]
    on_gpu = x.device.type == "cuda"
    ahead = tiles.ahead if weights_first and _can_fetch(weight) else 0
    dependent = {"launch_pdl": True} if on_gpu else {}
    _expert_gemm_kernel[(triton.cdiv(out_features, tiles.block_n), blocks.capacity, tiles.splits)](
        out, x, weight, x if bias is None else bias, x if topk_weights is None else topk_weights,
        x if delta is None else delta, blocks.order, blocks.order if blocks.is_lone else blocks.blocks,
        blocks.order.shape[0],
        constants.alpha, 0.0 if limit is None else limit, constants.up_offset,
        IN=weight.shape[2], OUT=out_features, X_DIV=blocks.top_k if x.dim() == 2 else 1,
        PAIRING=_PAIRINGS[row_order if activation else None], ACTIVATE=activation is not None,
        HAS_LIMIT=limit is not None, HAS_BIAS=bias is not None, HAS_ROUTED=topk_weights is not None,
        HAS_DELTA=delta is not None, SPLITS=tiles.splits, BLOCK_M=max(16, tiles.block_rows),
        BLOCK_N=tiles.block_n, BLOCK_K=tiles.step, STAGES=tiles.stages, HALVES=tiles.block_rows >= 128,
        LONE=blocks.is_lone, AHEAD=ahead, PDL=on_gpu, WEIGHTS_FIRST=weights_first, num_warps=tiles.num_warps,
        **dependent,
    )  # fmt: skip
    return out


def _can_fetch(weight: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes; steps of the tiles do anyway."""
    return weight.data_ptr() % 16 == 0 and weight.shape[2] * weight.element_size() % 16 == 0


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    activation: GatedActivation | None,
    row_order: RowOrder | None,
) -> None:
    if row_order is not None:
        check_row_order(row_order)
    num_pairs = blocks.order.shape[0]
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("expert_gemm: x, weight and out must be contiguous")
    if x.dtype != weight.dtype:
        raise ValueError(f"expert_gemm: x {x.dtype} and weight {weight.dtype} differ")
    rows = num_pairs // blocks.top_k if x.dim() == 2 else num_pairs
    if x.shape[-1] != weight.shape[2] or x.numel() != rows * weight.shape[2]:
        raise ValueError(f"expert_gemm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    width = weight.shape[1] // 2 if activation else weight.shape[1]
    if out.numel() != tiles.splits * num_pairs * width or out.shape[-1] != width:
        raise ValueError(f"expert_gemm: out {tuple(out.shape)} does not fit {num_pairs} pairs of {width}")
    if activation is not None and (row_order is None or tiles.splits > 1):
        raise ValueError("expert_gemm: an activation needs a row order and whole sums")
    if blocks.num_experts != weight.shape[0] or blocks.block_rows != tiles.block_rows:
        raise ValueError(f"expert_gemm: blocks of another weight or other tiles than {tiles}")
