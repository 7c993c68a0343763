"""A dense projection of few rows and its adapters' delta in one launch.

    y = x W^T + bias,    delta[t, columns of site j] = B_j @ (A_j @ x[t]),  NO_DELTA where there is no adapter

Shapes: x [T, in], y [T, out] of 16 bits, delta [T, out] float32, which whoever reads y adds. y has the bits
of `few_rows_linear` and delta those of `pair_lora`: these are their programs, the delta's first
(`joined_delta`).

A fork to a second stream and a join cost about 2 us on an H200, and behind a join a launch cannot start ahead
of the end of the one before. Here there is neither: A, B and W are all on their way before x is there.
Floor: the bytes of W, A and B at 4.3 TB/s. Predicted: 0.5 to 1 us more than the projection by itself. Two of
them in place of two beside saved a layer of Qwen3-30B-A3B 5.5 us at one row on an H200, gpt-oss-20b's 4.2.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.few_rows_linear import check_few_rows, few_rows_constants, few_rows_program
from lorikeet_kernels.lora.joined_delta import JoinedSites, delta_arguments, delta_program
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles


@triton.jit(
    do_not_specialize=["site0", "site1", "site2", "num_sites", "num_slots"],
    do_not_specialize_on_alignment=["out_ptr", "bias_ptr"],
)
def _few_rows_lora_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr,
    delta_ptr, rows_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr, token_slot_ptr,
    partial_ptr, seen_ptr, site0, site1, site2, num_sites, num_slots,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    FEW_ROWS: tl.constexpr, CHUNK: tl.constexpr, FEW_CHUNKS: tl.constexpr, VECTOR: tl.constexpr,
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
        few_rows_program(
            program - OF_DELTA, out_ptr, x_ptr, weight_ptr, bias_ptr, T, T_P2, IN, OUT, HAS_BIAS, FEW_ROWS,
            CHUNK, FEW_CHUNKS, VECTOR, PDL,
        )  # fmt: skip


def few_rows_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    delta: torch.Tensor,
    few: FewRowsTiles,
    adapters: JoinedSites,
) -> None:
    """Launch: `out` becomes the projection and `delta` what adapters add; see this module's docstring.

    Weights, tables and segments are read while the launch before still runs.
    """
    num_rows, columns = x.shape[0], weight.shape[0]
    check_few_rows(x, weight, bias, out, few)
    if few.products or delta.shape != out.shape:
        raise ValueError(f"few_rows_lora: delta {tuple(delta.shape)} for out {tuple(out.shape)}, {few}")
    first, of_delta = delta_arguments(x, delta, adapters, few.num_warps)
    base = few_rows_constants(num_rows, weight, few)
    pdl = x.device.type == "cuda"
    _few_rows_lora_kernel[(first + triton.cdiv(columns, few.rows),)](
        out_ptr=out, x_ptr=x.view(torch.int32), weight_ptr=weight.view(torch.int32),
        bias_ptr=out if bias is None else bias, **of_delta,
        T=base["T"], T_P2=base["T_P2"], IN=base["IN"], OUT=base["OUT"], HAS_BIAS=bias is not None,
        FEW_ROWS=base["ROWS"], CHUNK=base["CHUNK"], FEW_CHUNKS=base["CHUNKS"], VECTOR=base["VECTOR"],
        PDL=pdl, num_warps=few.num_warps,
        **({} if few.max_registers is None else {"maxnreg": few.max_registers}),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
