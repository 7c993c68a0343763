"""Dense projection.

    y = x W^T + bias

Shapes: x [T, in], weight [out, in], bias [out], result [T, out]. Accumulates in float32, rounds once to x's
dtype. On a GPU this is cuBLAS through torch, or `few_rows_linear` where that was measured to be faster. With
`batch_invariant` a row's bits do not depend on how many rows share the call; without it they depend on
nothing but their number.
"""

import torch
from torch.nn import functional as F

from lorikeet_kernels.dense.few_rows_linear import few_rows_linear, takes
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.few_rows_tiles import MAX_FEW_ROWS, select_few_rows

# Rows of every GEMM in batch-invariant mode, and what a CPU batch is filled up to otherwise: MKL's float32
# kernels add up a row in another order when fewer than four rows are left over. On an AMD EPYC (torch 2.13, 1
# and 2 threads, 7 shapes from 64x48 to 2048x256) only counts that are no multiple of 4 differed in a bit from
# the result of 64 rows; on an Intel Xeon with AVX-512 larger shapes differ up to 16 rows, hence the mode. One
# row of 512x128 takes 11 us, 4 rows 22 us, filling up included 36: batches are filled up once when built.
ROW_TILE = 4


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """See `linear`."""
    num_rows = x.shape[0]
    # 16-bit inputs are widened, which rounds once and is also faster where the CPU has no 16-bit matmul
    # (AMD EPYC, 4 rows of 512x128: 111 us in bfloat16, 40 us widened).
    wide, matrix = x.float(), weight.float()
    if missing := -num_rows % ROW_TILE:
        wide = F.pad(wide, (0, 0, 0, missing))
    if batch_invariant:
        y = torch.cat([F.linear(tile, matrix) for tile in wide.split(ROW_TILE)])
    else:
        y = F.linear(wide, matrix)
    y = y[:num_rows]
    if bias is not None:
        y += bias
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """Return the projection, a new tensor."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if x.is_cuda and not batch_invariant:
        if 1 <= x.shape[0] <= MAX_FEW_ROWS and takes(x, weight):
            tiles = select_few_rows(x.shape[0], *weight.shape, device_name(x))
            if tiles is not None:
                out = x.new_empty((x.shape[0], weight.shape[0]))
                return few_rows_linear(x, weight, bias, out, tiles)
        return F.linear(x, weight, bias)
    return linear_reference(x, weight, bias, batch_invariant=batch_invariant)
