"""RMS norm over the last dimension, with an optional residual added first.

    h = x + residual                      (where a residual is given; written back into it)
    y = h / sqrt(mean(h^2) + eps) * weight

Shapes: x, residual, out [..., H]; weight [H]. Dtypes: float32, bfloat16, float16, all alike. The sum is
rounded to the tensors' dtype before it is squared (it is what the next layer adds to); the rest is float32
and rounds once.
"""

import torch
from torch.nn import functional as F


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the norm of `x`, or of `x + residual`; in the latter case `residual` becomes that sum."""
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    return rms_norm_reference(x, weight, eps, residual)
