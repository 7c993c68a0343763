"""Norm, router and routing behind each other, by each way to the logits, for the bench."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional as F

from lorikeet_kernels.dense.rms_norm import rms_norm
from lorikeet_kernels.experts.router_logits import router_logits
from lorikeet_kernels.experts.routing import route_softmax
from lorikeet_kernels.tiling.router_tiles import router_tiles


def router_ways(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor,
    scale: torch.Tensor,
    top_k: int,
    columns: Sequence[int] = (),
) -> Mapping[str, list[Callable[[], None]]]:
    """A call for each of `weights` [E, H]; `columns` are other widths of parts to try."""
    rule = router_tiles(x.shape[1])
    tried = {"parts": rule} | {f"parts of {width}": type(rule)(width, rule.num_warps) for width in columns}

    def norm() -> torch.Tensor:
        return rms_norm(x, scale, 1e-5)

    def only_norm(weight: torch.Tensor) -> None:
        del weight
        norm()

    def by_cublas(weight: torch.Tensor) -> None:
        route_softmax(F.linear(norm(), weight, bias), top_k, renormalize=True)

    def by_parts(name: str) -> Callable[[torch.Tensor], None]:
        def launch(weight: torch.Tensor) -> None:
            route_softmax(router_logits(norm(), weight, bias, tried[name]), top_k, renormalize=True)

        return launch

    launches = {"norm": only_norm, "cuBLAS": by_cublas} | {name: by_parts(name) for name in tried}
    return {name: [lambda f=f, w=w: f(w) for w in weights] for name, f in launches.items()}
