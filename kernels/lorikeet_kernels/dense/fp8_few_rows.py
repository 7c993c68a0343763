"""Dense projection of very few rows by an e4m3 matrix on a GPU, of rows quantised before.

What it computes `fp8_gemm` says. Shapes: rows' values [T, in] with T up to MAX_ROWS and `in` a multiple of
16, weight [out, in], bias [out], out [T, out]. Products of e4m3 are exact in float32, sums float32: those of
the 16 numbers a lane loads at once first, times their scales where these are of blocks. A row's bits depend
on no other row.

As in `few_rows_linear` a program loads its rows of the matrix whole before it waits for the launch before,
here the one that quantises x, and lanes multiply by themselves: nothing passes through shared memory but the
sums.

Floor: the matrix's bytes at 4.3 TB/s. Measured on an H200 for one row, the quantising included: 78 % of it at
67 MB, 91 % at 235 MB, 101 % at 470 MB. A lane takes 2 operations a number to widen it and one for each row
of x.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.few_rows_linear import LANES, check_bias, joined
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import GROUP, QuantizedRows
from lorikeet_kernels.tiling.few_rows_tiles import VECTOR_BYTES, FewRowsTiles

MAX_ROWS = 8
"""As many sums as `joined` takes."""


# four numbers of a word, by halves: byte by byte the compiler takes twice as many operations
WIDEN = tl.constexpr(
    "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q;"
    " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


@triton.jit
def _widen(words, ON_GPU: tl.constexpr):
    """The four numbers in each word, as float32; the interpreter knows no assembly."""
    if ON_GPU:
        numbers = tl.inline_asm_elementwise(
            WIDEN, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        numbers = ()
        for b in tl.static_range(4):
            number = (words >> (8 * b)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            numbers = numbers + (number,)  # noqa: RUF005
    return numbers


@triton.jit
def _load_words(at, k, c: tl.constexpr, IN: tl.constexpr, CHUNK: tl.constexpr):
    """Chunk `c` of rows that begin at `at`; zeros beyond their end."""
    if (c + 1) * CHUNK <= IN:
        words = tl.load(at + c * CHUNK)
    else:
        words = tl.load(at + c * CHUNK, mask=k + c * CHUNK < IN, other=0)
    return words


@triton.jit
def fp8_few_rows_program(
    program, out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, num_columns,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, IS_BLOCKED: tl.constexpr, SHARES: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What one program does. Numbers are loaded by fours, as words: IN, GROUP, CHUNK and VECTOR count these.

    Numbers of 8 bits would be taken apart right behind their load, which then waits for the matrix before x
    is asked for. SHARES: the rows' block scales are one row's.
    """
    SPREAD: tl.constexpr = CHUNK // VECTOR
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    n = program * ROWS + tl.arange(0, ROWS)
    # rows beyond the matrix repeat the last one; they are never stored
    weight_row = tl.minimum(n, num_columns - 1)
    k = tl.arange(0, CHUNK)
    lane = tl.arange(0, SPREAD)
    weight_at = weight_ptr + weight_row.to(tl.int64)[:, None] * IN + k[None, :]
    parts = ()
    for c in tl.static_range(CHUNKS):
        parts = parts + (_load_words(weight_at, k[None, :], c, IN, CHUNK),)  # noqa: RUF005
    scales = ()
    if IS_BLOCKED:
        if SHARES:
            block = tl.zeros([1], tl.int32) + program * ROWS // (4 * GROUP)
        elif HAS_MAP:
            block = tl.load(map_ptr + weight_row)
        else:
            block = weight_row // (4 * GROUP)
        for c in tl.static_range(CHUNKS):
            group = tl.minimum((c * CHUNK + lane * VECTOR) // GROUP, GROUPS - 1)
            scale = tl.load(scale_ptr + block[:, None] * GROUPS + group[None, :])
            scales = scales + (scale,)  # noqa: RUF005
    else:
        scale = tl.load(scale_ptr + weight_row)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = (tl.zeros([ROWS, SPREAD], tl.float32),) * T_P2
    for c in tl.static_range(CHUNKS):
        added = ()
        w = _widen(parts[c], PDL)
        for t in tl.static_range(T_P2):
            total = sums[t]
            if t < T:
                x = _load_words(x_ptr + t * IN + k, k, c, IN, CHUNK)
                x = _widen(x, PDL)
                products = w[0] * x[0][None, :]
                for b in tl.static_range(1, 4):
                    products += w[b] * x[b][None, :]
                part = tl.sum(tl.reshape(products, [ROWS, SPREAD, VECTOR]), axis=2)
                if IS_BLOCKED:
                    group = tl.minimum((c * CHUNK + lane * VECTOR) // GROUP, GROUPS - 1)
                    part *= tl.load(x_scale_ptr + t * GROUPS + group)[None, :] * scales[c]
                total += part
            added = added + (total,)  # noqa: RUF005
        sums = added
    y = tl.reshape(tl.sum(joined(sums, T_P2), axis=1), [ROWS, T_P2])
    t = tl.arange(0, T_P2)
    if not IS_BLOCKED:
        y *= tl.load(x_scale_ptr + tl.minimum(t, T - 1))[None, :] * scale[:, None]
    if HAS_BIAS:
        y += bias[:, None]
    at = out_ptr + t[None, :] * num_columns + n[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(n < num_columns)[:, None] & (t < T)[None, :])


@triton.jit(do_not_specialize_on_alignment=["out_ptr", "bias_ptr"])
def _fp8_few_rows_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, num_columns,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, IS_BLOCKED: tl.constexpr, SHARES: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    fp8_few_rows_program(
        tl.program_id(0), out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, map_ptr, bias_ptr, num_columns,
        T, T_P2, IN, IS_BLOCKED, SHARES, HAS_MAP, HAS_BIAS, GROUP, ROWS, CHUNK, CHUNKS, VECTOR, PDL,
    )  # fmt: skip


def fp8_few_rows(
    x: QuantizedRows, weight: Fp8Weight, out: torch.Tensor, tiles: FewRowsTiles, bias: torch.Tensor | None
) -> torch.Tensor:
    """Write the projection into `out` [T, out] and return it; see this module's docstring."""
    check_fp8_few_rows(x, weight, out, bias)
    out_features, in_features = weight.shape
    on_gpu = out.device.type == "cuda"
    _fp8_few_rows_kernel[(triton.cdiv(out_features, tiles.rows),)](
        **fp8_few_rows_arguments(x, weight, out, tiles, bias), ROWS=tiles.rows,
        CHUNKS=num_fp8_chunks(in_features, tiles), PDL=on_gpu, num_warps=tiles.num_warps,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        **({"launch_pdl": True} if on_gpu else {}),
    )  # fmt: skip
    return out


def check_fp8_few_rows(
    x: QuantizedRows, weight: Fp8Weight, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Refuse what the kernel does not read."""
    num_rows, (out_features, in_features) = out.shape[0], weight.shape
    tensors = (x.values, x.scales, weight.values, weight.scales, out)
    if (
        not 1 <= num_rows <= MAX_ROWS
        or x.values.shape != (num_rows, in_features)
        or out.shape[1] != out_features
    ):
        raise ValueError(f"fp8_few_rows: x {tuple(x.values.shape)} and out {tuple(out.shape)}")
    if x.scales.shape != (num_rows, -(-in_features // GROUP) if weight.kind == "block" else 1):
        raise ValueError(f"fp8_few_rows: scales {tuple(x.scales.shape)} of x {tuple(x.values.shape)}")
    if in_features % VECTOR_BYTES or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"fp8_few_rows: contiguous tensors of rows of {VECTOR_BYTES} bytes, please")
    check_bias(bias, out_features)


def num_fp8_chunks(in_features: int, tiles: FewRowsTiles) -> int:
    """How often a program's warps together reach along a row."""
    return -(-in_features // (VECTOR_BYTES * LANES * tiles.num_warps))


def fp8_few_rows_arguments(
    x: QuantizedRows, weight: Fp8Weight, out: torch.Tensor, tiles: FewRowsTiles, bias: torch.Tensor | None
) -> dict[str, Any]:
    """What `fp8_few_rows_program` reads and writes and is compiled for, but for ROWS and CHUNKS."""
    is_blocked, has_map = weight.kind == "block", weight.block_of_row is not None
    words = VECTOR_BYTES // 4
    return {
        "out_ptr": out,
        "x_ptr": x.values.view(torch.int32),
        "x_scale_ptr": x.scales,
        "weight_ptr": weight.values.view(torch.int32),
        "scale_ptr": weight.scales,
        "map_ptr": weight.block_of_row if has_map else x.scales,
        "bias_ptr": out if bias is None else bias,
        "num_columns": out.shape[1],
        "T": out.shape[0],
        "T_P2": triton.next_power_of_2(out.shape[0]),
        "IN": weight.shape[1] // 4,
        "IS_BLOCKED": is_blocked,
        "SHARES": is_blocked and not has_map and GROUP % tiles.rows == 0,
        "HAS_MAP": has_map,
        "HAS_BIAS": bias is not None,
        "GROUP": GROUP // 4,
        "CHUNK": words * LANES * tiles.num_warps,
        "VECTOR": words,
    }
