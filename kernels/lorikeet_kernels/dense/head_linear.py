"""A projection of each head by a matrix of its own.

    y[t, h] = x[t, h] W[h]

Shapes: x [T, H, in], weight [H, in, out], out [T, H, out]; views are fine. Accumulates in float32, rounds
once to x's dtype. On a GPU this is one batched cuBLAS product through torch, which reads and writes the views
in place, or `few_heads_linear`. `batch_invariant` is as in `linear`.
"""

import torch
from torch.nn import functional as F

from lorikeet_kernels.dense.few_heads_linear import check_head_shapes, few_heads_linear, takes_heads
from lorikeet_kernels.dense.linear import ROW_TILE
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.few_heads_tiles import select_few_heads, takes_few_heads


def head_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, batch_invariant: bool = False
) -> torch.Tensor:
    """See `head_linear`."""
    num_rows = x.shape[0]
    rows, matrix = x.float().transpose(0, 1), weight.float()
    if missing := -num_rows % ROW_TILE:
        rows = F.pad(rows, (0, 0, 0, missing))
    if batch_invariant:
        y = torch.cat([torch.bmm(tile, matrix) for tile in rows.split(ROW_TILE, dim=1)], dim=1)
    else:
        y = torch.bmm(rows, matrix)
    return out.copy_(y[:, :num_rows].transpose(0, 1))


def head_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, batch_invariant: bool = False
) -> torch.Tensor:
    """Write the projections into `out` and return it."""
    check_head_shapes(x, weight, out)
    if x.device.type != "cpu" and not batch_invariant:
        if takes_few_heads(x.shape[0], device_name(x)) and takes_heads(x, weight, out):
            tiles = select_few_heads(*weight.shape[1:])
            return few_heads_linear(x, weight, out, tiles)
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out
    return head_linear_reference(x, weight, out, batch_invariant=batch_invariant)
