"""Grouped GEMM over e4m3 experts on a GPU, of rows quantised before, with what follows it fused.

    v[p] = sum over groups g of s[row(p), g] t[expert, row block, g] (W[expert] q[row(p)]) over g's columns
           + bias[expert]                                                       (weights scaled by blocks)
    v[p] = s[row(p)] t[expert, out] (W[expert] q[row(p)]) + bias[expert]        (weights scaled by channels)
    y[p] = activation(v[p])                    (gate_up: `row_order` says how gate and up rows lie)
    y[p] = topk_weights[p] v[p]                (down)
    part[s, p] = v[p] over the columns of split s, without a bias               (down, split)

Shapes: rows' values [T, in] (a token's pairs share its row) or [T, K, in]; weight [E, out, in]; bias [E,
out]; topk_weights [T, K] float32; out [T, K, out], [T, K, out / 2] with an activation, or float32 [splits, T,
K, out]; delta [T, K, out]. Accumulates in float32 (see `fp8_accumulate`); v rounds to out's dtype before the
activation, y rounds once more: the bits are those of `expert_linear`, `gated_activation` one after the other
but for the order of additions. With an activation `delta` is added to v between, and the sum rounded. A
pair's result depends on no other pair. The reference is `expert_linear_reference` over an Fp8Weight.


Floors: the touched experts' bytes at 4.3 TB/s, or 1,580 TFLOP/s; see docs/performance.md for predictions.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.fp8_accumulate import BY_ROW, BY_TILE, BY_TURNS, accumulate
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.dense.quantize_rows import GROUP, QuantizedRows
from lorikeet_kernels.dense.row_order import RowOrder, check_row_order
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.fp8_specialized import launch_specialized
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

_PAIRINGS = {None: 0, "interleaved": 1, "concatenated": 2}


@triton.jit
def _matrix_row(column, OUT: tl.constexpr, PAIRING: tl.constexpr):
    """The matrix's row of an accumulator's column: gate and up alternate there in every row order."""
    if PAIRING == 2:
        return column % 2 * (OUT // 2) + column // 2
    return column


@triton.jit
def _block_scales(
    scale_ptr, map_ptr, expert, row,
    IN: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_MAP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Where the block scales of the matrix's rows begin."""
    block = tl.load(map_ptr + row) if HAS_MAP else row // GROUP
    return scale_ptr + (expert * SCALE_ROWS + block) * ((IN + GROUP - 1) // GROUP)


@triton.jit
def _compute(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
    tile, split, first, count, expert, num_pairs, alpha, limit, up_offset,
    IN: tl.constexpr, OUT: tl.constexpr, X_DIV: tl.constexpr, PAIRING: tl.constexpr, ACTIVATE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTED: tl.constexpr, HAS_DELTA: tl.constexpr,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_MAP: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Up to PAIRS pairs times the program's columns."""
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (IN + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    m = tl.arange(0, PAIRS)
    is_row = m < count
    # places beyond the block's pairs repeat its first; their rows are never stored
    pair = tl.load(order_ptr + first + tl.where(is_row, m, 0))
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUT
    row = _matrix_row(column, OUT, PAIRING)
    # rows beyond the matrix repeat its first; their columns are never stored
    weight_row = tl.where(inside, row, 0)
    x_row = (pair // X_DIV).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + x_row[:, None] * IN + k[None, :]
    weight_at = weight_ptr + (expert * OUT + weight_row)[None, :] * IN + k[:, None]
    odd_scale_at = scale_ptr
    if SCALES == 0:
        x_scale_at = (x_scale_ptr + x_row)[:, None]
        scale_at = (scale_ptr + expert * OUT + weight_row)[None, :]
    else:
        x_scale_at = (x_scale_ptr + x_row * GROUPS)[:, None]
        if SCALES == BY_ROW:
            scale_row = weight_row[None, :]
        else:
            scale_row = tile * (BLOCK_N if SCALES == BY_TILE else BLOCK_N // 2)
        scale_at = _block_scales(scale_ptr, map_ptr, expert, scale_row, IN, SCALE_ROWS, HAS_MAP, GROUP)
        if SCALES == BY_TURNS:
            odd_row = scale_row + OUT // 2
            odd_scale_at = _block_scales(scale_ptr, map_ptr, expert, odd_row, IN, SCALE_ROWS, HAS_MAP, GROUP)
    acc = accumulate(
        x_at, weight_at, x_scale_at, scale_at, odd_scale_at, split * STEPS, IN, PAIRS, BLOCK_N, BLOCK_K,
        STEPS, IN % (BLOCK_K * SPLITS) == 0, STAGES, SCALES, GROUP,
    )  # fmt: skip
    if SCALES == 0:
        acc *= tl.load(x_scale_at) * tl.load(scale_at)
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
        to = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = out_ptr + pair.to(tl.int64)[:, None] * (OUT // 2) + to[None, :]
        tl.store(at, y.to(dtype), mask=is_row[:, None] & (to < OUT // 2)[None, :])
    else:
        if HAS_ROUTED:
            acc *= tl.load(routed_ptr + pair)[:, None]
        at = out_ptr + (split * num_pairs + pair).to(tl.int64)[:, None] * OUT + row[None, :]
        tl.store(at, acc.to(dtype), mask=is_row[:, None] & inside[None, :])


@triton.jit
def fp8_gemm_program(
    tile, block, split, out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr,
    delta_ptr, order_ptr, blocks_ptr, num_pairs, alpha, limit, up_offset,
    IN: tl.constexpr, OUT: tl.constexpr, X_DIV: tl.constexpr, PAIRING: tl.constexpr, ACTIVATE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTED: tl.constexpr, HAS_DELTA: tl.constexpr,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_MAP: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What one program does: a tile of the matrix's rows, a block of pairs, a split of the columns."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(blocks_ptr + block * 4)
    count = tl.load(blocks_ptr + block * 4 + 1)
    expert = tl.load(blocks_ptr + block * 4 + 2).to(tl.int64)
    if count == 0:
        return
    if HALVES and count <= BLOCK_M // 2:  # an expert's last block: half the work where half suffices
        _compute(
            out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr, delta_ptr,
            order_ptr, tile, split, first, count, expert, num_pairs, alpha, limit, up_offset, IN, OUT, X_DIV,
            PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, SCALES, SCALE_ROWS, HAS_MAP,
            GROUP, SPLITS, BLOCK_M // 2, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        _compute(
            out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr, delta_ptr,
            order_ptr, tile, split, first, count, expert, num_pairs, alpha, limit, up_offset, IN, OUT, X_DIV,
            PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, SCALES, SCALE_ROWS, HAS_MAP,
            GROUP, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["num_pairs"])
def _fp8_gemm_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr,
    blocks_ptr, num_pairs, alpha, limit, up_offset,
    IN: tl.constexpr, OUT: tl.constexpr, X_DIV: tl.constexpr, PAIRING: tl.constexpr, ACTIVATE: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTED: tl.constexpr, HAS_DELTA: tl.constexpr,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_MAP: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    fp8_gemm_program(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), out_ptr, x_ptr, x_scale_ptr, weight_ptr,
        scale_ptr, map_ptr, bias_ptr, routed_ptr, delta_ptr, order_ptr, blocks_ptr, num_pairs, alpha, limit,
        up_offset, IN, OUT, X_DIV, PAIRING, ACTIVATE, HAS_LIMIT, HAS_BIAS, HAS_ROUTED, HAS_DELTA, SCALES,
        SCALE_ROWS, HAS_MAP, GROUP, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, HALVES, PDL,
    )  # fmt: skip


def fp8_gemm(
    x: QuantizedRows,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    row_order: RowOrder | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write every pair's result into `out` and return it; see this module's docstring."""
    check_fp8_gemm(x, weight, blocks, out, tiles, activation, row_order)
    if blocks.capacity == 0:
        return out
    constants = activation or GatedActivation()
    limit = constants.limit
    out_features, is_blocked = weight.shape[1], weight.kind == "block"
    on_gpu = out.device.type == "cuda"
    if tiles.kernel == "specialized":
        _check_specialized(weight, tiles, activation, row_order)
        return launch_specialized(x, weight, blocks, out, tiles, bias, topk_weights, activation, delta)
    options: dict[str, int | bool] = {"num_warps": tiles.num_warps}
    if on_gpu:
        options["launch_pdl"] = True
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    values, unused = x.values, x.scales
    pairing = _PAIRINGS[row_order if activation else None]
    _fp8_gemm_kernel[(triton.cdiv(out_features, tiles.block_n), blocks.capacity, tiles.splits)](
        out, values, x.scales, weight.values, weight.scales,
        unused if weight.block_of_row is None else weight.block_of_row,
        unused if bias is None else bias, unused if topk_weights is None else topk_weights,
        unused if delta is None else delta, blocks.order, blocks.blocks, blocks.order.shape[0],
        constants.alpha, 0.0 if limit is None else limit, constants.up_offset,
        IN=weight.shape[2], OUT=out_features, X_DIV=blocks.top_k if values.dim() == 2 else 1,
        PAIRING=pairing, ACTIVATE=activation is not None,
        HAS_LIMIT=limit is not None, HAS_BIAS=bias is not None, HAS_ROUTED=topk_weights is not None,
        HAS_DELTA=delta is not None, SCALES=scale_kind(weight, tiles.block_n, is_paired=pairing == 2),
        SCALE_ROWS=weight.scales.shape[1] if is_blocked else 0, HAS_MAP=weight.block_of_row is not None,
        GROUP=GROUP, SPLITS=tiles.splits, BLOCK_M=max(16, tiles.block_rows), BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.step, STAGES=tiles.stages, HALVES=tiles.block_rows >= 128, PDL=on_gpu,
        **options,
    )  # fmt: skip
    return out


def scale_kind(weight: Fp8Weight, block_n: int, *, is_paired: bool) -> int:
    """How many block scales a program's rows have, which then need no loads of their own: see BY_ROW."""
    if weight.kind == "channel":
        return 0
    rows = block_n // 2 if is_paired else block_n
    if weight.block_of_row is not None or GROUP % rows or (is_paired and weight.shape[1] // 2 % GROUP):
        return BY_ROW.value
    return BY_TURNS.value if is_paired else BY_TILE.value


def check_fp8_gemm(
    x: QuantizedRows,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    activation: GatedActivation | None,
    row_order: RowOrder | None,
) -> None:
    """Raise ValueError where these do not fit together."""
    if row_order is not None:
        check_row_order(row_order)
    if blocks.is_lone:
        raise ValueError("fp8_gemm: pairs must be cut into blocks; those of `lone_blocks` are expert_gemm's")
    num_pairs, values = blocks.order.shape[0], x.values
    contiguous = (values, x.scales, weight.values, weight.scales, out)
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise ValueError("fp8_gemm: x, weight, their scales and out must be contiguous")
    rows = num_pairs // blocks.top_k if values.dim() == 2 else num_pairs
    in_features = weight.shape[2]
    if values.shape[-1] != in_features or values.numel() != rows * in_features:
        raise ValueError(f"fp8_gemm: x {tuple(values.shape)} does not fit weight {tuple(weight.shape)}")
    groups = -(-in_features // GROUP) if weight.kind == "block" else 1
    if x.scales.shape != (rows, groups):
        raise ValueError(f"fp8_gemm: scales {tuple(x.scales.shape)} of {rows} rows in {groups} groups")
    width = weight.shape[1] // 2 if activation else weight.shape[1]
    if out.numel() != tiles.splits * num_pairs * width or out.shape[-1] != width:
        raise ValueError(f"fp8_gemm: out {tuple(out.shape)} does not fit {num_pairs} pairs of {width}")
    if activation is not None and (row_order is None or tiles.splits > 1):
        raise ValueError("fp8_gemm: an activation needs a row order and whole sums")
    if weight.kind == "block" and GROUP % tiles.step:
        raise ValueError(f"fp8_gemm: {tiles}: a step must lie within {GROUP} columns")
    if blocks.num_experts != weight.shape[0] or blocks.block_rows != tiles.block_rows:
        raise ValueError(f"fp8_gemm: blocks of another weight or other tiles than {tiles}")


def _check_specialized(
    weight: Fp8Weight, tiles: ExpertTiles, activation: GatedActivation | None, row_order: RowOrder | None
) -> None:
    halves = 2 if activation else 1
    if (
        weight.kind != "block"
        or weight.block_of_row is not None
        or weight.shape[1] % (halves * GROUP)
        or weight.shape[2] % GROUP
        or (activation is not None and row_order != "concatenated")
        or (tiles.block_n, tiles.step, tiles.splits) != (GROUP, GROUP, 1)
        or tiles.block_rows not in (128, 192)
        or tiles.num_warps != tiles.block_rows // 16 + 4
    ):
        raise ValueError(f"fp8_gemm: {tiles} take whole blocks of {GROUP}, not {tuple(weight.shape)}")
