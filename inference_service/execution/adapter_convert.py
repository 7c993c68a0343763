"""From a payload's site to what kernels read: the compute dtype, scaling multiplied into B, rounded once."""

import math

import torch

from inference_service.domain.errors import PayloadError
from lorikeet_contract.manifest import PayloadDtype, PayloadSite, TensorRange
from lorikeet_contract.schema import LoraSite, RowOrder, SiteKind

TORCH_DTYPES = {
    PayloadDtype.FLOAT32: torch.float32,
    PayloadDtype.BFLOAT16: torch.bfloat16,
    PayloadDtype.FLOAT16: torch.float16,
}


def convert_site(
    site: LoraSite,
    stored: PayloadSite,
    placed: PayloadSite,
    source: torch.Tensor,
    source_offset: int,
    payload_dtype: PayloadDtype,
    destination: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Fill one site's A and B.

    Args:
        site: the model's site.
        stored: its place in the payload.
        placed: its place on this node.
        source: bytes [N] of the payload from `source_offset` on.
        source_offset: see `source`.
        payload_dtype: the payload's element type.
        destination: the revision's bytes on this node.
        dtype: the compute dtype.

    Raises:
        PayloadError: a value is not finite, or does not fit the compute dtype.
    """
    for name, where, target, factor in (
        ("A", stored.a, placed.a, None),
        ("B", stored.b, placed.b, _row_factors(site, stored.scales)),
    ):
        values = _view(source, where.offset - source_offset, where, TORCH_DTYPES[payload_dtype])
        out = _view(destination, target.offset, target, dtype)
        out.copy_(values if factor is None else values.float() * factor)
        if not torch.isfinite(out).all():
            if not torch.isfinite(values).all():
                raise PayloadError(f"site {site.name}: {name} holds NaN or infinity")
            raise PayloadError(
                f"site {site.name}: {name} times its scaling overflows {str(dtype).removeprefix('torch.')}, "
                "in which this node computes; serve the adapter with --dtype bfloat16 or float32",
                metadata={"site": site.name, "dtype": str(dtype).removeprefix("torch.")},
            )


def _view(data: torch.Tensor, offset: int, tensor: TensorRange, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = math.prod(tensor.shape) * dtype.itemsize
    return data[offset : offset + num_bytes].view(dtype).view(tensor.shape)


def _row_factors(site: LoraSite, scales: tuple[float, ...]) -> torch.Tensor | None:
    """What B's rows are multiplied by, broadcastable to B; None where that is 1 throughout."""
    if all(scale == 1 for scale in scales):
        return None
    factors = torch.tensor(scales, dtype=torch.float32)
    if len(scales) == 1:
        return factors
    factors = factors.view(-1, len(site.slices))  # [1 or E, slices]
    if site.row_order is RowOrder.INTERLEAVED:
        rows = factors.repeat(1, site.out_features // len(site.slices))
    else:
        sizes = torch.tensor([s.out_features for s in site.slices])
        rows = factors.repeat_interleave(sizes, dim=1)
    return rows.unsqueeze(-1) if site.kind is SiteKind.EXPERTS else rows.view(-1, 1)
