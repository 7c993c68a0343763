"""Down of few pairs over e4m3 experts and its adapters' delta in one launch.

    y[p] = topk_weights[p] (W[expert] quantised(x[p]) + bias[expert])
    delta[p] = topk_weights[p] B[expert] (A[expert] x[p])

Shapes: x [T, K, in] of 16 bits, W an Fp8Weight [E, out, in], out [T, K, out] or float32 [splits, T, K, out],
delta [T, K, out] of 16 bits, which the top-k sum adds. y has the bits of `fp8_gemm` and delta those of
`moe_lora_down`: these are their programs, the delta's first (`joined_delta`).

Beside the GEMM the delta costs a fork and a join, behind which the sum cannot start ahead. Floor: the bytes
of W, A and B at 4.3 TB/s.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import GROUP, QuantizedRows
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.fp8_gemm import check_fp8_gemm, fp8_gemm_program, scale_kind
from lorikeet_kernels.lora.joined_delta import JoinedSites, delta_arguments, delta_program
from lorikeet_kernels.lora.pair_lora import check_routed
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles


@triton.jit(
    do_not_specialize=["num_pairs", "num_blocks", "site0", "site1", "site2", "num_sites", "num_slots"],
    do_not_specialize_on_alignment=["num_pairs", "num_blocks"],
)
def _fp8_gemm_lora_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr, order_ptr, blocks_ptr,
    num_pairs, num_blocks,
    delta_ptr, rows_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr,
    topk_ids_ptr, partial_ptr, seen_ptr, site0, site1, site2, num_sites, num_slots,
    IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTED: tl.constexpr,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_MAP: tl.constexpr, GROUP: tl.constexpr,
    GEMM_SPLITS: tl.constexpr, GEMM_M: tl.constexpr, GEMM_N: tl.constexpr, GEMM_K: tl.constexpr,
    STAGES: tl.constexpr, TOP_K: tl.constexpr,
    PARTS: tl.constexpr, OF_DELTA: tl.constexpr, K: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
    NUM_LANES: tl.constexpr, TILES: tl.constexpr, NUM_LAUNCH_SITES: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    RANK_P2: tl.constexpr, SLOT_SCAN: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < OF_DELTA:
        delta_program(
            program, delta_ptr, rows_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr,
            token_slot_ptr, partial_ptr, seen_ptr, site0, site1, site2, num_sites, num_slots,
            PARTS, K, N, LANES, NUM_LANES, TILES, NUM_LAUNCH_SITES, ROWS, CHUNKS, SPLITS, BLOCK_K, BLOCK_N,
            RANK_P2, SLOT_SCAN, SPIN_LIMIT, PDL, topk_ids_ptr, routed_ptr, TOP_K, HAS_EXPERTS=True,
        )  # fmt: skip
    else:
        GEMM_TILES: tl.constexpr = (OUT + GEMM_N - 1) // GEMM_N
        place = program - OF_DELTA
        block = place // GEMM_TILES
        fp8_gemm_program(
            place % GEMM_TILES, block % num_blocks, block // num_blocks, out_ptr, x_ptr, x_scale_ptr,
            weight_ptr, scale_ptr, map_ptr, bias_ptr, routed_ptr, routed_ptr, order_ptr, blocks_ptr,
            num_pairs, 0.0, 0.0, 0.0,
            IN=IN, OUT=OUT, X_DIV=1, PAIRING=0, ACTIVATE=False, HAS_LIMIT=False, HAS_BIAS=HAS_BIAS,
            HAS_ROUTED=HAS_ROUTED, HAS_DELTA=False, SCALES=SCALES, SCALE_ROWS=SCALE_ROWS, HAS_MAP=HAS_MAP,
            GROUP=GROUP, SPLITS=GEMM_SPLITS, BLOCK_M=GEMM_M, BLOCK_N=GEMM_N, BLOCK_K=GEMM_K, STAGES=STAGES,
            HALVES=False, PDL=PDL,
        )  # fmt: skip


def fp8_gemm_lora(
    quantized: QuantizedRows,
    x: torch.Tensor,
    weight: Fp8Weight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    delta: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tiles: ExpertTiles,
    adapters: JoinedSites,
    *,
    bias: torch.Tensor | None,
) -> None:
    """Launch: `out` becomes the pairs' rows, or their parts, and `delta` what adapters of `x` add.

    Experts' ids, adapters and segments are read while the launch before still runs: only where that one
    started after the routing had ended.
    """
    check_fp8_gemm(quantized, weight, blocks, out, tiles, None, None)
    check_routed(topk_ids, topk_weights)
    num_pairs, (_, out_features, in_features) = topk_ids.numel(), weight.shape
    if tiles.kernel != "decode" or not topk_ids.shape[1] == adapters.top_k == blocks.top_k:
        raise ValueError(f"fp8_gemm_lora: {tiles} and {blocks.top_k} experts a token for {adapters.top_k}")
    fits = x.shape == (*topk_ids.shape, in_features) and delta.shape == (*topk_ids.shape, out_features)
    if not fits or blocks.order.shape[0] != num_pairs:
        raise ValueError(
            f"fp8_gemm_lora: x {tuple(x.shape)}, delta {tuple(delta.shape)} and {blocks.order.shape[0]} "
            f"pairs in blocks for topk_ids {tuple(topk_ids.shape)} and weight {tuple(weight.shape)}"
        )
    if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"fp8_gemm_lora: bias {tuple(bias.shape)} for weight {tuple(weight.shape)}")
    rows, added = x.view(num_pairs, in_features), delta.view(num_pairs, out_features)
    first, of_delta = delta_arguments(rows, added, adapters, tiles.num_warps, x.dtype)
    is_split, pdl = tiles.splits > 1, x.device.type == "cuda"
    of_gemm = triton.cdiv(out_features, tiles.block_n) * blocks.capacity * tiles.splits
    _fp8_gemm_lora_kernel[(first + of_gemm,)](
        out_ptr=out, x_ptr=quantized.values, x_scale_ptr=quantized.scales, weight_ptr=weight.values,
        scale_ptr=weight.scales,
        map_ptr=weight.scales if weight.block_of_row is None else weight.block_of_row,
        bias_ptr=x if bias is None else bias, routed_ptr=topk_weights, order_ptr=blocks.order,
        blocks_ptr=blocks.blocks, num_pairs=num_pairs, num_blocks=blocks.capacity, topk_ids_ptr=topk_ids,
        **of_delta, IN=in_features, OUT=out_features, HAS_BIAS=bias is not None and not is_split,
        HAS_ROUTED=not is_split, SCALES=scale_kind(weight, tiles.block_n, is_paired=False),
        SCALE_ROWS=weight.scales.shape[1] if weight.kind == "block" else 0,
        HAS_MAP=weight.block_of_row is not None, GROUP=GROUP, GEMM_SPLITS=tiles.splits,
        GEMM_M=max(16, tiles.block_rows), GEMM_N=tiles.block_n, GEMM_K=tiles.step, STAGES=tiles.stages,
        TOP_K=blocks.top_k, PDL=pdl, num_warps=tiles.num_warps,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
