"""Dense projections of few rows by both ways, weights cold, for bench and tune."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from lorikeet_kernels.benchmarking.bench_problem import COLD_BYTES
from lorikeet_kernels.dense.few_rows_linear import few_rows_linear
from lorikeet_kernels.dense.rms_norm import rms_norm
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsShape, FewRowsTiles

SIZES = {
    "gpt-oss-20b qkv": (5120, 2880),
    "gpt-oss-20b o": (2880, 4096),
    "qwen3-30b-a3b qkv": (5120, 2048),
    "qwen3-30b-a3b o": (2048, 4096),
    "llama-3.3-70b qkv": (10240, 8192),
    "llama-3.3-70b o": (8192, 8192),
}
"""Outputs and inputs."""


@dataclass(frozen=True, slots=True)
class FewRowsPoint:
    """One projection: weights that together are cold, a bias, and an x and an out for each of them."""

    name: str
    shape: FewRowsShape
    weights: Sequence[torch.Tensor]
    bias: torch.Tensor
    xs: Sequence[torch.Tensor]
    outs: Sequence[torch.Tensor]

    @property
    def num_bytes(self) -> float:
        """What must be read."""
        return 2.0 * self.shape.out_features * self.shape.in_features

    def own(self, tiles: FewRowsTiles) -> list[Callable[[], None]]:
        """The own kernel."""

        def launch(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
            few_rows_linear(x, weight, self.bias, out, tiles)

        return [lambda w=w, x=x, o=o: launch(w, x, o) for w, x, o in self._sets()]

    def cublas(self) -> list[Callable[[], None]]:
        """What torch calls."""

        def launch(weight: torch.Tensor, x: torch.Tensor) -> None:
            F.linear(x, weight, self.bias)

        return [lambda w=w, x=x: launch(w, x) for w, x, _ in self._sets()]

    def after_norm(self, calls: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Each of `calls` behind a norm of as many rows."""
        scale = torch.ones(self.shape.in_features, dtype=self.bias.dtype, device=self.bias.device)

        def launch(call: Callable[[], None], x: torch.Tensor) -> None:
            rms_norm(x, scale, 1e-5)
            call()

        return [lambda c=c, x=x: launch(c, x) for c, x in zip(calls, self.xs, strict=True)]

    def _sets(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return list(zip(self.weights, self.xs, self.outs, strict=True))


def few_rows_point(name: str, num_rows: int) -> FewRowsPoint:
    """A point of `SIZES` on the current GPU, in bfloat16."""
    out_features, in_features = SIZES[name]
    count = max(3, -(-COLD_BYTES // (2 * out_features * in_features)))
    weights = [
        torch.empty(out_features, in_features, device="cuda").normal_().bfloat16() for _ in range(count)
    ]
    return FewRowsPoint(
        name,
        FewRowsShape(num_rows, out_features, in_features),
        weights,
        torch.randn(out_features, device="cuda").bfloat16(),
        [torch.randn(num_rows, in_features, device="cuda").bfloat16() for _ in weights],
        [torch.empty(num_rows, out_features, device="cuda").bfloat16() for _ in weights],
    )


def with_rows(point: FewRowsPoint, num_rows: int) -> FewRowsPoint:
    """The same weights with another number of rows."""
    shape = FewRowsShape(num_rows, point.shape.out_features, point.shape.in_features)
    xs = [torch.randn(num_rows, shape.in_features, device="cuda").bfloat16() for _ in point.weights]
    outs = [torch.empty(num_rows, shape.out_features, device="cuda").bfloat16() for _ in point.weights]
    return FewRowsPoint(point.name, shape, point.weights, point.bias, xs, outs)
