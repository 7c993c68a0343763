"""Grouped GEMM over MXFP4 experts re-laid for the GPU, with what follows it fused.

    v[p] = W[expert] x[row(p)] + bias[expert]
    y[p] = activation(v[p])                    (gate_up: weight laid out with a pairing)
    y[p] = topk_weights[p] v[p]                (down)
    part[s, p] = W[expert, columns of split s] x[row(p)]        (down, split; `moe_sum_parts` finishes it)

Shapes: x [T, in] (a token's pairs share its row) or [T, K, in]; bias [E, out]; topk_weights [T, K] float32;
out [T, K, out], [T, K, out / 2] with an activation, or float32 [splits, T, K, out]; delta [T, K, out]. bf16.
Accumulates in float32; v rounds to bf16 before the activation, y rounds once more: the bits are those of
`expert_linear`, `gated_activation` one after the other. With an activation `delta` is added to v between, and
the sum rounded. A pair's result depends on no other pair. The reference is `expert_linear_reference` over the
weight as released.
"""

# The kernels' launches take options that their signatures lack.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false

import torch
import triton

from lorikeet_kernels.dense.gated_activation import GatedActivation
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.mxfp4_decode import _mxfp4_decode_kernel  # pyright: ignore[reportPrivateUsage]
from lorikeet_kernels.experts.mxfp4_layout import TILE_ROWS, Mxfp4DeviceWeight
from lorikeet_kernels.experts.mxfp4_prefill import _mxfp4_prefill_kernel  # pyright: ignore[reportPrivateUsage]
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

_PAIRINGS = {None: 0, "interleaved": 1, "concatenated": 2}


def mxfp4_linear(
    x: torch.Tensor,
    weight: Mxfp4DeviceWeight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    delta: torch.Tensor | None = None,
    weights_first: bool = False,
) -> torch.Tensor:
    """Write every pair's result into `out` and return it; see this module's docstring. GPU only.

    `weights_first` fetches weights while the launch before still runs. Only where that one started after the
    making of `blocks` had ended: another of this op over them, or what follows one.
    """
    _check(x, weight, blocks, out, tiles, activation, delta)
    if blocks.capacity == 0:
        return out
    unused = x  # a pointer that the kernel does not read
    num_pairs = blocks.order.shape[0]
    constants = activation or GatedActivation()
    limit = constants.limit
    shared = {
        "IN": weight.in_features,
        "OUT": weight.out_features,
        "TILES": weight.num_tiles,
        "CHUNKS": weight.num_chunks,
        "X_DIV": blocks.top_k if x.dim() == 2 else 1,
        "PAIRING": _PAIRINGS[weight.pairing],
        "ACTIVATE": activation is not None,
        "HAS_LIMIT": limit is not None,
        "HAS_BIAS": bias is not None,
        "HAS_ROUTED": topk_weights is not None,
        "HAS_DELTA": delta is not None,
        "BLOCK_ROWS": blocks.block_rows,
        "ROW_TILES": tiles.block_n // (TILE_ROWS * tiles.num_warps),
        "STEP": tiles.step,
        "STAGES": tiles.stages,
        "WARPS": tiles.num_warps,
        "PDL": True,
        "num_warps": tiles.num_warps,
        "launch_pdl": True,
    }
    numbers = (
        2.0**weight.exponent_shift,
        constants.alpha,
        0.0 if limit is None else limit,
        constants.up_offset,
    )
    bias_arg = unused if bias is None else bias
    routed = unused if topk_weights is None else topk_weights
    delta_arg = unused if delta is None else delta
    grid = (triton.cdiv(weight.num_tiles * TILE_ROWS, tiles.block_n), blocks.capacity)
    if tiles.kernel == "decode":
        _mxfp4_decode_kernel[(*grid, tiles.splits)](
            out, x, weight.words, weight.scales, bias_arg, routed, delta_arg, blocks.order, blocks.blocks,
            num_pairs, *numbers, SPLITS=tiles.splits, WEIGHTS_FIRST=weights_first, **shared,
        )  # fmt: skip
        return out
    limited = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    _mxfp4_prefill_kernel[grid](
        out, x, weight.words, weight.scales, bias_arg, routed, delta_arg, blocks.order, blocks.blocks,
        *numbers, HALVES=blocks.block_rows >= 64, **shared, **limited,
    )  # fmt: skip
    return out


def _check(
    x: torch.Tensor,
    weight: Mxfp4DeviceWeight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    activation: GatedActivation | None,
    delta: torch.Tensor | None,
) -> None:
    if blocks.is_lone:
        raise ValueError(
            "mxfp4_linear: pairs must be cut into blocks; those of `lone_blocks` are expert_gemm's"
        )
    num_pairs = blocks.order.shape[0]
    if x.dtype != torch.bfloat16 or not x.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"mxfp4_linear: x {x.dtype}: pass contiguous bfloat16, and a contiguous out")
    rows = num_pairs // blocks.top_k if x.dim() == 2 else num_pairs
    if x.shape[-1] != weight.in_features or x.numel() != rows * weight.in_features:
        raise ValueError(f"mxfp4_linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    width = weight.out_features // 2 if activation else weight.out_features
    if out.numel() != tiles.splits * num_pairs * width or out.shape[-1] != width:
        raise ValueError(f"mxfp4_linear: out {tuple(out.shape)} does not fit {num_pairs} pairs of {width}")
    if activation is not None and weight.pairing is None:
        raise ValueError("mxfp4_linear: an activation needs a weight laid out with a pairing")
    if delta is not None and activation is None:
        raise ValueError("mxfp4_linear: a delta goes before an activation")
    if tiles.splits > 1 and (activation is not None or tiles.kernel != "decode"):
        raise ValueError("mxfp4_linear: only the decode kernel without an activation splits")
    if tiles.kernel == "prefill" and tiles.step < 2:
        # the dequantised operand of the MMA in flight would be overwritten (seen in the compiler's output)
        raise ValueError("mxfp4_linear: the prefill kernel takes at least two chunks a step")
    if blocks.num_experts != weight.num_experts or blocks.block_rows != tiles.block_rows:
        raise ValueError(f"mxfp4_linear: blocks of another weight or other tiles than {tiles}")
    if tiles.block_n % (TILE_ROWS * tiles.num_warps):
        raise ValueError(f"mxfp4_linear: {tiles}: block_n must be a multiple of 16 rows a warp")
