"""Rotary position embedding, in place on queries and keys.

    (a, b) -> (a cos - b sin, b cos + a sin)   for each pair (a, b) of a head, angle = position * frequency

Pairs are (i, i + D/2) of the rotated part, or neighbours (2i, 2i + 1) with `interleaved`. A table narrower than
the head rotates its first 2 * half elements only.

Shapes: q [T, Hq, D], k [T, Hkv, D], views are fine; positions [T] int64; table [P, 2, half] float32, cosines then
sines, any attention factor multiplied in. Computes in float32, rounds once.
"""

import torch


def rotary_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """See `rotary`."""
    cos, sin = table[positions].unsqueeze(1).unbind(2)  # each [T, 1, half]
    _rotate(q, cos, sin, interleaved)
    _rotate(k, cos, sin, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    a, b = first.float(), second.float()
    rotated = a * cos - b * sin
    second.copy_(b * cos + a * sin)
    first.copy_(rotated)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate `q` and `k` in place by their tokens' positions."""
    if 2 * table.shape[-1] > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"rotary: table {tuple(table.shape)} does not fit heads {tuple(q.shape)} and {tuple(k.shape)}"
        )
    rotary_reference(q, k, positions, table, interleaved=interleaved)
