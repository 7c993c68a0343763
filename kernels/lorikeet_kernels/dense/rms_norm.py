"""RMS norm over the last dimension, with an optional residual added first.

    h = x + residual                      (where a residual is given; written back into it)
    y = h / sqrt(mean(h^2) + eps) * weight

Shapes: x, residual, out [..., H]; weight [H]. Dtypes: float32, bfloat16, float16, all alike. The sum is
rounded to the tensors' dtype before it is squared (it is what the next layer adds to); the rest is float32
and rounds once.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch.nn import functional as F


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, weight_ptr, eps,
    WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        at = residual_ptr + row * WIDTH + column
        h = (h.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(at, h, mask=inside)
    wide = h.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    y = wide * scale * weight
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Launch over contiguous rows; `rms_norm` on a GPU, and what the interpreter tests."""
    width = weight.shape[0]
    num_rows = x.numel() // width
    block = triton.next_power_of_2(width)
    pdl = x.device.type == "cuda"
    if num_rows > 0:
        _rms_norm_kernel[(num_rows,)](
            out, x, x if residual is None else residual, weight, eps,
            WIDTH=width, HAS_RESIDUAL=residual is not None, BLOCK=block, PDL=pdl,
            num_warps=min(16, max(1, block // 512)), **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the norm of `x`, or of `x + residual`; in the latter case `residual` becomes that sum."""
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if x.device.type == "cpu":
        return rms_norm_reference(x, weight, eps, residual)
    if residual is not None and not residual.is_contiguous():
        raise ValueError(f"rms_norm: residual's strides {residual.stride()} are not contiguous")
    return norm_rows(x.contiguous(), weight, eps, residual, torch.empty_like(x).contiguous())
