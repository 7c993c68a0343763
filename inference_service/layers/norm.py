"""RMS norm as a layer."""

import torch

from inference_service.layers.projected import Projected
from lorikeet_kernels.dense.rms_norm import rms_norm


class RmsNorm:
    """Weight [H] and epsilon."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of `x`, or of x + residual, which `residual` then holds."""
        return rms_norm(x, self.weight, self.eps, residual)

    def of(self, projected: Projected) -> torch.Tensor:
        """Return the norm of `projected`."""
        joined = projected.is_joined
        return rms_norm(projected.y, self.weight, self.eps, delta=projected.delta, delta_is_joined=joined)

    def after(self, projected: Projected, residual: torch.Tensor) -> torch.Tensor:
        """Return the norm of `projected` + residual, which `residual` then holds."""
        return rms_norm(
            projected.y,
            self.weight,
            self.eps,
            residual,
            projected.delta,
            delta_is_joined=projected.is_joined,
        )
