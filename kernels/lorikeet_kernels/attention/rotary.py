"""Rotary position embedding, in place on queries and keys.

    (a, b) -> (a cos - b sin, b cos + a sin)   for each pair (a, b) of a head, angle = position * frequency

Pairs are (i, i + D/2) of the rotated part, or neighbours (2i, 2i + 1) with `interleaved`. A table narrower
than the head rotates its first 2 * half elements only.

Shapes: heads [T, N, D], query and key heads together, a view into the fused projection is fine; positions [T]
int64; table [P, 2, half] float32, cosines then sines, any attention factor multiplied in. Computes in
float32, rounds once.
"""

import torch


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


def rotary(
    heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False
) -> None:
    """Rotate the heads in place by their tokens' positions."""
    if 2 * table.shape[-1] > heads.shape[-1]:
        raise ValueError(f"rotary: table {tuple(table.shape)} does not fit heads {tuple(heads.shape)}")
    rotary_reference(heads, positions, table, interleaved=interleaved)
