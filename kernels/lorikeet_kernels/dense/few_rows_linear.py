"""Dense projection of up to 16 rows on a GPU, where reading the weight is all that takes time.

    y = x W^T + bias

Shapes: x [T, in] with T up to MAX_FEW_ROWS and `in` a multiple of 8, weight [out, in], bias [out], result
[T, out]; all bfloat16 or all float16. Products and sums in float32, one rounding. A row's bits depend neither
on the other rows nor on their number while the tiles have as many warps. `linear` calls this where it is the
faster way and `linear_reference` says what it computes.

A program loads its rows of W whole before it waits for the launch before: they are on their way while that
one still runs, which is why W and the bias must be older than it. Nothing is split that a second launch would
have to add up.

Floor: W's bytes at 4.3 TB/s (gpt-oss-20b: qkv 6.9 us, o 5.5). Predicted: 1.5 us more for one row, the first
bytes' way and the last programs' sums. With more rows lanes multiply longer, up to MAX_LANE_ROWS; tiles with
`products` use the tensor cores instead (`few_rows_products`).
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.few_rows_products import few_rows_products
from lorikeet_kernels.tiling.few_rows_tiles import (
    MAX_FEW_ROWS,
    MAX_LANE_ROWS,
    VECTOR_BYTES,
    FewRowsTiles,
    num_chunks,
)

LANES = 32


@triton.jit
def joined(sums, COUNT: tl.constexpr):
    """Tensors [R, L] as one [R, L, ...] whose trailing axes, of two each, count them in order."""
    if COUNT == 1:
        y = sums[0]
    elif COUNT == 2:
        y = tl.join(sums[0], sums[1])
    elif COUNT == 4:
        y = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    else:
        even = tl.join(tl.join(sums[0], sums[4]), tl.join(sums[2], sums[6]))
        y = tl.join(even, tl.join(tl.join(sums[1], sums[5]), tl.join(sums[3], sums[7])))
    return y


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    """The first number of each word as float32; of bfloat16 that is one operation."""
    if tl.bfloat16 == DTYPE:
        y = (words << 16).to(tl.float32, bitcast=True)
    else:
        y = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    """The second one."""
    if tl.bfloat16 == DTYPE:
        y = (words & -65536).to(tl.float32, bitcast=True)
    else:
        y = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _load_chunk(x_ptr, c: tl.constexpr, T: tl.constexpr, IN: tl.constexpr, CHUNK: tl.constexpr):
    """Chunk `c` of each row of x, a tuple."""
    k = c * CHUNK + tl.arange(0, CHUNK)
    xs = ()
    for t in tl.static_range(T):
        if (c + 1) * CHUNK <= IN:
            x = tl.load(x_ptr + t * IN + k)
        else:
            x = tl.load(x_ptr + t * IN + k, mask=k < IN, other=0)
        xs = xs + (x,)  # noqa: RUF005 (Triton unpacks nothing into a tuple)
    return xs


@triton.jit
def few_rows_program(
    program, out_ptr, x_ptr, weight_ptr, bias_ptr,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What one program does. Numbers are loaded in pairs, as words: IN, CHUNK and VECTOR count these.

    Numbers of 16 bits are taken apart right behind their load, which then waits for the weight there, before
    it has asked for x.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = program * ROWS + tl.arange(0, ROWS)
    # rows beyond the weight repeat the last one; they are never stored
    weight_row = tl.minimum(n, OUT - 1).to(tl.int64)
    k = tl.arange(0, CHUNK)
    weight_at = weight_ptr + weight_row[:, None] * IN + k[None, :]
    parts = ()
    for c in tl.static_range(CHUNKS):
        if (c + 1) * CHUNK <= IN:
            part = tl.load(weight_at + c * CHUNK, eviction_policy="evict_first")
        else:
            inside = (c * CHUNK + k < IN)[None, :]
            part = tl.load(weight_at + c * CHUNK, mask=inside, other=0, eviction_policy="evict_first")
        parts = parts + (part,)  # noqa: RUF005 (Triton unpacks nothing into a tuple)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = (tl.zeros([ROWS, CHUNK // VECTOR], tl.float32),) * T_P2
    for c in tl.static_range(CHUNKS):
        xs = _load_chunk(x_ptr, c, T, IN, CHUNK)
        low, high = _low(parts[c], dtype), _high(parts[c], dtype)
        added = ()
        for t in tl.static_range(T_P2):
            total = sums[t]
            if t < T:
                products = low * _low(xs[t], dtype)[None, :] + high * _high(xs[t], dtype)[None, :]
                # the products of a lane's 16 bytes add up in its own registers
                total += tl.sum(tl.reshape(products, [ROWS, CHUNK // VECTOR, VECTOR]), axis=2)
            added = added + (total,)  # noqa: RUF005
        sums = added
    y = tl.reshape(tl.sum(joined(sums, T_P2), axis=1), [ROWS, T_P2])
    if HAS_BIAS:
        y += bias[:, None]
    t = tl.arange(0, T_P2)
    at = out_ptr + t[None, :] * OUT + n[:, None]
    tl.store(at, y.to(dtype), mask=(n < OUT)[:, None] & (t < T)[None, :])


# where a bias or a result lies decides nothing: a model's biases lie anywhere
@triton.jit(do_not_specialize_on_alignment=["out_ptr", "bias_ptr"])
def _few_rows_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr,
    T: tl.constexpr, T_P2: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    few_rows_program(
        tl.program_id(0), out_ptr, x_ptr, weight_ptr, bias_ptr, T, T_P2, IN, OUT, HAS_BIAS, ROWS, CHUNK,
        CHUNKS, VECTOR, PDL,
    )  # fmt: skip


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: FewRowsTiles
) -> torch.Tensor:
    """Write the projection into `out` [T, out] and return it; see this module's docstring."""
    check_few_rows(x, weight, bias, out, tiles)
    num_rows, out_features = out.shape
    if tiles.products:
        few_rows_products(x, weight, bias, out, tiles)
        return out
    pdl = x.device.type == "cuda"
    _few_rows_kernel[(triton.cdiv(out_features, tiles.rows),)](
        out, x.view(torch.int32), weight.view(torch.int32), out if bias is None else bias,
        **few_rows_constants(num_rows, weight, tiles), HAS_BIAS=bias is not None, PDL=pdl,
        num_warps=tiles.num_warps,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def check_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: FewRowsTiles
) -> None:
    """Raise ValueError where the kernels do not take these."""
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    most = MAX_FEW_ROWS if tiles.products else MAX_LANE_ROWS
    if not 1 <= num_rows <= most:
        raise ValueError(f"few rows: {tiles} take {most} rows at most, not {num_rows}")
    if x.shape[1] != in_features or out.shape != (num_rows, out_features):
        raise ValueError(
            f"few rows: x {tuple(x.shape)} and out {tuple(out.shape)} for weight {tuple(weight.shape)}"
        )
    if not takes(x, weight) or not out.is_contiguous() or out.dtype != x.dtype:
        raise ValueError(
            f"few rows: x, weight and out must be contiguous, of 16 bits, {VECTOR_BYTES} bytes aligned"
        )
    check_bias(bias, out_features)


def check_bias(bias: torch.Tensor | None, out_features: int) -> None:
    """Raise ValueError unless it has a number for each output, side by side."""
    if bias is not None and (bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)}, strides {bias.stride()}, for {out_features} outputs")


def few_rows_constants(num_rows: int, weight: torch.Tensor, tiles: FewRowsTiles) -> dict[str, int]:
    """The sizes that `few_rows_program` is compiled for."""
    out_features, in_features = weight.shape
    words = VECTOR_BYTES // 4
    return {
        "T": num_rows,
        "T_P2": 1 << (num_rows - 1).bit_length(),
        "IN": in_features // 2,
        "OUT": out_features,
        "ROWS": tiles.rows,
        "CHUNK": words * LANES * tiles.num_warps,
        "CHUNKS": num_chunks(in_features, tiles.num_warps),
        "VECTOR": words,
    }


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel reads such tensors."""
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % (VECTOR_BYTES // 2) == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and (x.data_ptr() | weight.data_ptr()) % VECTOR_BYTES == 0
    )
