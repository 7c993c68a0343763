"""Dense projection.

    y = x W^T + bias

Shapes: x [T, in], weight [out, in], bias [out], result [T, out]. Accumulates in float32, rounds once to x's
dtype. On a GPU this is cuBLAS through torch. On a CPU a row's result does not depend on how many rows share
the call.
"""

import torch
from torch.nn import functional as F

# MKL's float32 kernels add up a row in another order when fewer than four rows are left over: of 1..64 rows,
# only counts that are no multiple of 4 differed in a bit from the 64-row result (1 and 2 threads, 7 shapes
# from 64x48 to 2048x256, AMD EPYC, torch 2.13). One row of 512x128 takes 11 us, 4 rows 22 us, filling up
# included 36: so batches are filled up once, by whoever builds them, and here only what still is not.
ROW_TILE = 4


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `linear`."""
    # 16-bit inputs are widened, which rounds once and is also faster where the CPU has no 16-bit matmul
    # (AMD EPYC, 4 rows of 512x128: 111 us in bfloat16, 40 us widened).
    y = float32_rows(x.float(), weight.float())
    if bias is not None:
        y += bias
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def float32_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, in] times `weight` [out, in] transposed, each row's bits independent of T."""
    rows = x.shape[0]
    missing = -rows % ROW_TILE
    if missing == 0:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight)[:rows]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the projection, a new tensor."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if x.is_cuda:
        return F.linear(x, weight, bias)
    return linear_reference(x, weight, bias)
