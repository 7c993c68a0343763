"""`head_linear` of few rows on a GPU, where reading the weight is all that takes time.

    y[t, h] = x[t, h] W[h]

Shapes and views as there, of 16 bits. Products and sums in float32, one rounding. A row's bits depend neither
on the other rows nor on their number.

A program loads a tile of a head's W, all inputs by some columns, before it waits for the launch before: W
must be older than that. The other rows' programs find the tile in the L2.

Floor: W's bytes at 4.3 TB/s (DeepSeek-V2-Lite, 2.1 MB: 0.5 us). Predicted: 1.8 us for one row in a graph.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.tiling.few_heads_tiles import FewHeadsTiles

ALIGNED = 8  # numbers of 16 bytes
ALIGNED_BYTES = 16


@triton.jit
def head_place(OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, head, columns) of a program: those of other rows, which share its tile, are neighbours."""
    TILES: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    n = (tile % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(0), tile // TILES, n


@triton.jit
def load_head_tile(
    weight_ptr, head, n, STRIDE_H: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_N: tl.constexpr,
    IN: tl.constexpr, IN_P2: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Columns `n` of a head's weight, [COLUMNS, IN_P2]."""
    k = tl.arange(0, IN_P2)
    at = weight_ptr + head.to(tl.int64) * STRIDE_H + n[:, None] * STRIDE_N + k[None, :] * STRIDE_K
    return tl.load(at, mask=(n < OUT)[:, None] & (k < IN)[None, :], other=0.0)


@triton.jit
def load_head(x_ptr, token, head, stride_xt, STRIDE_XH: tl.constexpr, IN: tl.constexpr, IN_P2: tl.constexpr):
    """A head's inputs, [IN_P2] float32."""
    k = tl.arange(0, IN_P2)
    at = x_ptr + token.to(tl.int64) * tl.multiple_of(stride_xt, 8) + head * STRIDE_XH + k
    return tl.load(at, mask=k < IN, other=0.0).to(tl.float32)


@triton.jit
def head_sums(x, weight):
    """The products' sums, [COLUMNS] float32."""
    return tl.sum(weight.to(tl.float32) * x[None, :], axis=1)


# each number of rows has strides of its own
@triton.jit(
    do_not_specialize=["stride_ot", "stride_xt"], do_not_specialize_on_alignment=["stride_ot", "stride_xt"]
)
def _few_heads_kernel(
    out_ptr, x_ptr, weight_ptr, stride_ot, stride_xt,
    STRIDE_OH: tl.constexpr, STRIDE_XH: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_K: tl.constexpr,
    STRIDE_N: tl.constexpr, IN: tl.constexpr, IN_P2: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token, head, n = head_place(OUT, COLUMNS)
    weight = load_head_tile(weight_ptr, head, n, STRIDE_H, STRIDE_K, STRIDE_N, IN, IN_P2, OUT)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = head_sums(load_head(x_ptr, token, head, stride_xt, STRIDE_XH, IN, IN_P2), weight)
    out_at = out_ptr + token.to(tl.int64) * stride_ot + head * STRIDE_OH + n
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=n < OUT)


def takes_heads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernel reads such tensors."""
    return (
        x.dtype == weight.dtype == out.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(2) == out.stride(2) == 1
        and 1 in weight.stride()[1:]
        and (x.stride(0) | x.stride(1)) % ALIGNED == 0
        and (x.data_ptr() | weight.data_ptr() | out.data_ptr()) % ALIGNED_BYTES == 0
    )


def check_head_shapes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError where heads, inputs, outputs or rows differ."""
    num_heads, in_features, out_features = weight.shape
    if x.shape[1:] != (num_heads, in_features) or out.shape != (x.shape[0], num_heads, out_features):
        raise ValueError(
            f"heads' weight {tuple(weight.shape)} does not fit x {tuple(x.shape)} and out {tuple(out.shape)}"
        )


def check_few_heads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError where the kernel would read or write other memory, or be compiled anew."""
    check_head_shapes(x, weight, out)
    if not takes_heads(x, weight, out):
        raise ValueError(
            f"few heads: x {x.dtype} {x.stride()}, weight {weight.dtype} {weight.stride()} and out "
            f"{out.dtype} {out.stride()} must be of 16 bits, their rows contiguous, 16 bytes aligned"
        )


def few_heads_constants(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tiles: FewHeadsTiles
) -> dict[str, int]:
    """The sizes that the kernel is compiled for, also that with adapters."""
    _, in_features, out_features = weight.shape
    return {
        "STRIDE_OH": out.stride(1),
        "STRIDE_XH": x.stride(1),
        "STRIDE_H": weight.stride(0),
        "STRIDE_K": weight.stride(1),
        "STRIDE_N": weight.stride(2),
        "IN": in_features,
        "IN_P2": 1 << (in_features - 1).bit_length(),
        "OUT": out_features,
        "COLUMNS": tiles.columns,
    }


def few_heads_grid(x: torch.Tensor, weight: torch.Tensor, tiles: FewHeadsTiles) -> tuple[int, int]:
    """Programs: of each row, for each head and tile of its columns."""
    heads, _, out_features = weight.shape
    return x.shape[0], heads * -(-out_features // tiles.columns)


def few_heads_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tiles: FewHeadsTiles
) -> torch.Tensor:
    """Write the projections into `out` and return it; see this module's docstring."""
    check_few_heads(x, weight, out)
    pdl = x.device.type == "cuda"
    _few_heads_kernel[few_heads_grid(x, weight, tiles)](
        out, x, weight, out.stride(0), x.stride(0), **few_heads_constants(x, weight, out, tiles),
        PDL=pdl, num_warps=tiles.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
