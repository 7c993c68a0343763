"""Rotary position embedding, in place on queries and keys.

    (a, b) -> (a cos - b sin, b cos + a sin)   for each pair (a, b) of a head, angle = position * frequency

Pairs are (i, i + D/2) of the rotated part, or neighbours (2i, 2i + 1) with `interleaved`. A table narrower
than the head rotates its first 2 * half elements only.

Shapes: heads [T, N, D], query and key heads together, a view into the fused projection is fine; positions [T]
int64; table [P, 2, half] float32, cosines then sines, any attention factor multiplied in. Computes in
float32, rounds once.
"""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false

import torch
import triton
import triton.language as tl


def rotary_reference(
    heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False
) -> None:
    """See `rotary`."""
    half = table.shape[-1]
    cos, sin = table.index_select(0, positions).unsqueeze(1).unbind(2)  # each [T, 1, half]
    if interleaved:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    a, b = first.float(), second.float()
    rotated_a = (a * cos).addcmul_(b, sin, value=-1)
    rotated_b = (b * cos).addcmul_(a, sin)
    first.copy_(rotated_a)
    second.copy_(rotated_b)


@triton.jit
def rotated(a, b, cos, sin):
    """The pairs (a, b) of one dtype, turned in a kernel.

    Of each sum the product with a is rounded. Left to itself the compiler rounds now this one and now that,
    and the bits would depend on what else a kernel does, such as adding what adapters add.
    """
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    turned_a = tl.fma(wide_b, -sin, wide_a * cos)
    turned_b = tl.fma(wide_b, cos, wide_a * sin)
    return turned_a.to(a.dtype), turned_b.to(a.dtype)


def rotary(
    heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False
) -> None:
    """Rotate the heads in place by their tokens' positions."""
    if 2 * table.shape[-1] > heads.shape[-1]:
        raise ValueError(f"rotary: table {tuple(table.shape)} does not fit heads {tuple(heads.shape)}")
    rotary_reference(heads, positions, table, interleaved=interleaved)
