"""A dense projection of very few rows by an e4m3 matrix, and its adapters' delta, in one launch.

As `few_rows_lora`, with the programs of `fp8_few_rows`: y [T, out] is the projection of quantised rows, delta
[T, out] float32 what adapters add, of rows x [T, in] as they were, in 16 bits.

Floor: the bytes of W, A and B at 4.3 TB/s. Predicted: as `few_rows_lora`, 2 to 3 us less than beside.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.fp8_few_rows import (
    check_fp8_few_rows,
    fp8_few_rows_arguments,
    fp8_few_rows_program,
    num_fp8_chunks,
)
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import QuantizedRows
from lorikeet_kernels.lora.joined_delta import JoinedSites, delta_arguments, delta_program
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

MAX_REGISTERS = 80
"""The projection takes 58 to 80, the delta 93 to 127 (ptxas, sm_90): with these fewer programs fit a
multiprocessor than without adapters. Capped, the delta's spill about ten words."""


@triton.jit(
    do_not_specialize=["site0", "site1", "site2", "num_sites", "num_slots"],
    do_not_specialize_on_alignment=["out_ptr", "bias_ptr"],
)
def _fp8_few_rows_lora_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, num_columns,
    delta_ptr, rows_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr,
    partial_ptr, seen_ptr, site0, site1, site2, num_sites, num_slots,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, IS_BLOCKED: tl.constexpr, SHARES: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, FEW_ROWS: tl.constexpr,
    CHUNK: tl.constexpr, FEW_CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
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
            RANK_P2, SLOT_SCAN, SPIN_LIMIT, PDL,
        )  # fmt: skip
    else:
        fp8_few_rows_program(
            program - OF_DELTA, out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr,
            num_columns, T, T_P2, IN, IS_BLOCKED, SHARES, HAS_MAP, HAS_BIAS, GROUP, FEW_ROWS, CHUNK,
            FEW_CHUNKS, VECTOR, PDL,
        )  # fmt: skip


def fp8_few_rows_lora(
    quantized: QuantizedRows,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    out: torch.Tensor,
    delta: torch.Tensor,
    few: FewRowsTiles,
    adapters: JoinedSites,
) -> None:
    """Launch: `out` becomes the projection of `quantized` and `delta` what adapters of `x` add.

    Weights, tables and segments are read while the launch before still runs.
    """
    check_fp8_few_rows(quantized, weight, out, bias)
    if x.shape != quantized.values.shape or delta.shape != out.shape:
        raise ValueError(f"fp8_few_rows_lora: x {tuple(x.shape)}, delta {tuple(delta.shape)}")
    first, of_delta = delta_arguments(x, delta, adapters, few.num_warps)
    out_features, in_features = weight.shape
    pdl = x.device.type == "cuda"
    _fp8_few_rows_lora_kernel[(first + triton.cdiv(out_features, few.rows),)](
        **fp8_few_rows_arguments(quantized, weight, out, few, bias), **of_delta, FEW_ROWS=few.rows,
        FEW_CHUNKS=num_fp8_chunks(in_features, few), PDL=pdl, num_warps=few.num_warps,
        maxnreg=MAX_REGISTERS,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
