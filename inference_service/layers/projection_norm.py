"""RMS norm over all heads of the queries together, and of the keys, before anything else happens to them."""

import torch

from lorikeet_kernels.attention.head_norm import head_norm


class ProjectionNorm:
    """Weights [Hq * D] and [Hkv * D]."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
        self.weights = (q_weight, k_weight)
        self.eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Norm queries [T, Hq, D] and keys [T, Hkv, D] in place, views of one projection."""
        for heads, weight in zip((q, k), self.weights, strict=True):
            # A view of one wide head, never a copy: a row's heads lie side by side.
            head_norm(heads.view(heads.shape[0], 1, -1), weight[None], self.eps)
