"""Add up what a token's experts made of it.

    y[t] = sum_k x[t, k]            (routed weights are multiplied in already)

Shapes: x [T, K, H], result [T, H]. Adds in float32, k ascending, rounds once.
"""

import torch


def moe_sum_reference(x: torch.Tensor) -> torch.Tensor:
    """See `moe_sum`."""
    return x.float().sum(dim=1).to(x.dtype)


def moe_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the experts of each token."""
    if x.dim() != 3:
        raise ValueError(f"moe_sum: expected [T, K, H], got {tuple(x.shape)}")
    return moe_sum_reference(x)
