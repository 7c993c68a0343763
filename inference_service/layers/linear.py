"""A dense projection with its LoRA sites, fused ones side by side."""

from dataclasses import dataclass

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.projected import Projected
from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.linear import linear
from lorikeet_kernels.lora.joined_linear import joined_linear
from lorikeet_kernels.lora.lora_linear import lora_linear


@dataclass(frozen=True, slots=True)
class LinearSites:
    """The table indices of a projection's sites, in the order of their columns, and each one's columns.

    `num_slices` says of each site whether its columns are one piece or two (gate and up) of equal size.
    """

    indices: tuple[int, ...]
    out_features: tuple[int, ...]
    num_slices: tuple[int, ...]


class Linear:
    """Weight [out, in], maybe quantised, maybe a bias [out], and the sites that cover its columns."""

    def __init__(
        self,
        weight: torch.Tensor | Fp8Weight,
        bias: torch.Tensor | None,
        sites: LinearSites,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.sites = sites
        self.batch_invariant = batch_invariant

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """Project `x` [T, in] to [T, out]; rows with an adapter get its delta added, of `x` as it is."""
        y = self.base(x)
        if lora.is_active:
            self._adapt(y, x, lora, accumulate=True)
        return y

    def beside(self, x: torch.Tensor, lora: LoraBatch) -> Projected:
        """As a call, for a reader that can add: adapters run on the side stream, or in the same launch."""
        side = lora.side
        if not lora.is_active or side is None:
            return Projected(self(x, lora))
        joined = self._joined(x, lora) if x.shape[0] in side.rows.joined else None
        if joined is not None:
            return Projected(*joined, is_joined=True)
        if x.shape[0] not in side.rows.dense:
            return Projected(self(x, lora))
        shape = (x.shape[0], sum(self.sites.out_features))
        delta = torch.empty(shape, dtype=torch.float32, device=x.device)
        y = side.beside(lambda: self.base(x), lambda: self._adapt(delta, x, lora, accumulate=False))
        return Projected(y, delta)

    def _joined(self, x: torch.Tensor, lora: LoraBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.batch_invariant:
            return None
        sites = self.sites
        return joined_linear(
            x, self.weight, self.bias, lora.segments, lora.tables, sites.indices, sites.out_features,
            sites.num_slices,
        )  # fmt: skip

    def base(self, x: torch.Tensor) -> torch.Tensor:
        """The projection without adapters."""
        if isinstance(self.weight, Fp8Weight):
            return fp8_linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)
        return linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)

    def _adapt(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, *, accumulate: bool) -> None:
        sites = self.sites
        lora_linear(
            out, x, lora.segments, lora.tables, sites.indices, sites.out_features, sites.num_slices,
            accumulate=accumulate,
        )  # fmt: skip
