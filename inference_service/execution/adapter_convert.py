"""From a payload's site to what kernels read: the compute dtype, scaling multiplied into B, rounded once."""

import math

import torch

from inference_service.domain.errors import PayloadError
from inference_service.models import is_finite
from lorikeet_contract.manifest import PayloadDtype, PayloadSite, TensorRange
from lorikeet_contract.schema import LoraSite, RowOrder, SiteKind

TORCH_DTYPES = {
    PayloadDtype.FLOAT32: torch.float32,
    PayloadDtype.BFLOAT16: torch.bfloat16,
    PayloadDtype.FLOAT16: torch.float16,
}


# Fewer elements than torch would share out among threads, of which each reader's thread would start its own,
# and few enough to stay in the core's cache between one operation and the next.
_PART = 32_000


def convert_site(
    site: LoraSite,
    stored: PayloadSite,
    placed: PayloadSite,
    source: torch.Tensor,
    source_offset: int,
    payload_dtype: PayloadDtype,
    destination: torch.Tensor,
    destination_offset: int,
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
        destination: the revision's bytes on this node from `destination_offset` on.
        destination_offset: see `destination`.
        dtype: the compute dtype.

    Raises:
        PayloadError: a value is not finite, or does not fit the compute dtype.
    """
    for name, where, target, factor in (
        ("A", stored.a, placed.a, None),
        ("B", stored.b, placed.b, _row_factors(site, stored.scales)),
    ):
        values = _view(source, where.offset - source_offset, where, TORCH_DTYPES[payload_dtype])
        out = _view(destination, target.offset - destination_offset, target, dtype)
        _multiply(values, factor, out)
        if not is_finite(out):
            raise _refusal(site, name, dtype, is_stored_finite=is_finite(values))


def scale_site(
    site: LoraSite, placed: PayloadSite, data: torch.Tensor, offset: int, dtype: torch.dtype
) -> None:
    """Multiply one site's B, in place; else as `convert_site` of a payload in the compute dtype.

    Args:
        site: the model's site.
        placed: its place on this node.
        data: the revision's bytes on this node from `offset` on.
        offset: see `data`.
        dtype: the compute dtype.

    Raises:
        PayloadError: a value is not finite, or is not once it is multiplied.
    """
    for name, where, factor in (("A", placed.a, None), ("B", placed.b, _row_factors(site, placed.scales))):
        values = _view(data, where.offset - offset, where, dtype)
        if not is_finite(values):
            raise _refusal(site, name, dtype, is_stored_finite=False)
        if factor is not None:
            _multiply(values, factor, values)
            if not is_finite(values):
                raise _refusal(site, name, dtype, is_stored_finite=True)


def _multiply(values: torch.Tensor, factor: torch.Tensor | None, out: torch.Tensor) -> None:
    """`out` is `values`, times `factor` in float32, rounded once; it may be `values` itself."""
    if factor is not None and factor.numel() > 1:
        out.copy_(values.float() * factor)
        return
    # One call for all parts where the dtype stays: with twelve readers, each return to Python waits for the
    # interpreter's lock.
    parts, into = values.view(-1).split(_PART), out.view(-1).split(_PART)
    if values.dtype != out.dtype:
        scale = 1.0 if factor is None else float(factor)
        for part, target in zip(parts, into, strict=True):
            target.copy_(part if factor is None else part.float().mul_(scale))
        return
    if values is not out:
        torch._foreach_copy_(into, parts)  # pyright: ignore[reportPrivateUsage,reportPrivateImportUsage]
    if factor is not None:
        # A number would be rounded to the dtype before, a tensor is not.
        torch._foreach_mul_(into, factor.view(()))  # pyright: ignore[reportPrivateUsage,reportPrivateImportUsage]


def _refusal(site: LoraSite, name: str, dtype: torch.dtype, *, is_stored_finite: bool) -> PayloadError:
    if not is_stored_finite:
        return PayloadError(f"site {site.name}: {name} holds NaN or infinity")
    shown = str(dtype).removeprefix("torch.")
    return PayloadError(
        f"site {site.name}: {name} times its scaling overflows {shown}, in which this node computes; serve "
        "the adapter with --dtype bfloat16 or float32",
        metadata={"site": site.name, "dtype": shown},
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
