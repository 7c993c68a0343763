"""What some families do to query and key heads before the usual head norm and rotation, each in place."""

from collections.abc import Callable

import torch

from lorikeet_kernels.attention.head_norm import head_norm
from lorikeet_kernels.attention.rotary import rotary

HeadStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Changes queries [T, Hq, D] and keys [T, Hkv, D], views of one projection, at positions [T]."""


class ProjectionNorm:
    """RMS norm over all heads of the queries together, and of the keys; weights [Hq * D] and [Hkv * D]."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
        self.weights = (q_weight, k_weight)
        self.eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """See HeadStep."""
        del positions
        for heads, weight in zip((q, k), self.weights, strict=True):
            # A view of one wide head, never a copy: a row's heads lie side by side.
            head_norm(heads.view(heads.shape[0], 1, -1), weight[None], self.eps)


class PairwiseRotary:
    """Rotation of neighbouring elements; `table` as `rope_table` makes it."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """See HeadStep."""
        for heads in (q, k):
            rotary(heads, positions, self.table, interleaved=True)


class UnitNorm:
    """RMS norm of each head without a weight; `ones` is [Hq, D] with Hq at least Hkv."""

    def __init__(self, ones: torch.Tensor, eps: float) -> None:
        self.ones = ones
        self.eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """See HeadStep."""
        del positions
        for heads in (q, k):
            head_norm(heads, self.ones[: heads.shape[1]], self.eps)


class QueryTemperature:
    """Queries times a factor of their position, `factors` [P] float32."""

    def __init__(self, factors: torch.Tensor) -> None:
        self.factors = factors

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """See HeadStep."""
        del k
        q.copy_(q.float() * self.factors.index_select(0, positions).view(-1, 1, 1))


def temperature_factors(
    strength: float, interval: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """1 + strength * log(1 + floor((position + 1) / interval)) of every position, [P] float32."""
    steps = torch.floor((torch.arange(num_positions, dtype=torch.float32) + 1.0) / interval)
    return (torch.log1p(steps) * strength + 1.0).to(device)
