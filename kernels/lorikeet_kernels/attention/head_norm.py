"""RMS norm of every query and key head, in place, between the projection and the rotation.

    head = head / sqrt(mean(head^2) + eps) * weight of that head

Shapes: heads [T, N, D], a view into the fused projection is fine; weight [N, D], a row for each head: query
heads all have the same one, key heads another. Computes in float32, rounds once to heads' dtype.
"""

import torch
from torch.nn import functional as F


def head_norm_reference(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """See `head_norm`."""
    normed = F.rms_norm(heads.float(), weight.shape[1:], None, eps)
    heads.copy_(normed * weight)


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalise the heads in place."""
    if heads.shape[1:] != weight.shape:
        raise ValueError(f"head_norm: weight {tuple(weight.shape)} does not fit heads {tuple(heads.shape)}")
    head_norm_reference(heads, weight, eps)
