"""RMS norm of every query and key head, in place, between the projection and the rotation.

    head = head / sqrt(mean(head^2) + eps) * weight

Shapes: q [T, Hq, D], k [T, Hkv, D], views into the fused projection are fine; weights [D]. Computes in float32,
rounds once to the tensors' dtype.
"""

import torch

from lorikeet_kernels.rms_norm import rms_norm_reference


def head_norm_reference(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> None:
    """See `head_norm`."""
    q.copy_(rms_norm_reference(q, q_weight, eps))
    k.copy_(rms_norm_reference(k, k_weight, eps))


def head_norm(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> None:
    """Normalise the heads of `q` and `k` in place."""
    if q.shape[-1:] != q_weight.shape or k.shape[-1:] != k_weight.shape:
        raise ValueError(
            f"head_norm: weights {tuple(q_weight.shape)} and {tuple(k_weight.shape)} do not fit heads "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    head_norm_reference(q, k, q_weight, k_weight, eps)
