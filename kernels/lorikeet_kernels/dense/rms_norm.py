"""RMS norm over the last dimension, with an optional residual added first.

    x = x + delta                         (where a delta is given: what adapters add to x)
    h = x + residual                      (where a residual is given; written back into it)
    y = h / sqrt(mean(h^2) + eps) * weight

Shapes: x, residual, out [..., H], delta [..., H] float32; weight [H]. Dtypes: float32, bfloat16, float16, all
alike. Each sum is rounded to the tensors' dtype before it goes on (it is what the next layer adds to); the
rest is float32 and rounds once.
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
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `rms_norm`."""
    if delta is not None:
        x = (x.float() + delta).to(x.dtype)
    if residual is not None:
        x = residual.add_(x)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, delta_ptr, weight_ptr, eps,
    WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * WIDTH + column, mask=inside, other=0.0)
        h = (h.to(tl.float32) + delta).to(h.dtype)
    if HAS_RESIDUAL:
        at = residual_ptr + row * WIDTH + column
        h = (h.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype)
        tl.store(at, h, mask=inside)
    wide = h.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    y = wide * scale * weight
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    delta: torch.Tensor | None = None,
    *,
    delta_is_joined: bool = False,
) -> torch.Tensor:
    """Launch over contiguous rows; `rms_norm` on a GPU, and what the interpreter tests.

    A delta that is not of the launch before comes from another stream, after whose join a launch waits for
    what is before it in any case.
    """
    width = weight.shape[0]
    num_rows = x.numel() // width
    block = triton.next_power_of_2(width)
    pdl = x.device.type == "cuda"
    if num_rows > 0:
        _rms_norm_kernel[(num_rows,)](
            out, x, x if residual is None else residual, x if delta is None else delta, weight, eps,
            WIDTH=width, HAS_RESIDUAL=residual is not None, HAS_DELTA=delta is not None, BLOCK=block, PDL=pdl,
            num_warps=min(16, max(1, block // 512)),
            **({"launch_pdl": True} if pdl and (delta is None or delta_is_joined) else {}),
        )  # fmt: skip
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    *,
    delta_is_joined: bool = False,
) -> torch.Tensor:
    """Return the norm of `x`, or of `x + residual`; in the latter case `residual` becomes that sum.

    `delta` is added to `x` first, which itself stays as it is; `delta_is_joined` where one launch made both.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if delta is not None and (delta.shape != x.shape or delta.dtype != torch.float32):
        raise ValueError(f"rms_norm: delta {delta.dtype} {tuple(delta.shape)}, not float32 {tuple(x.shape)}")
    if x.device.type == "cpu":
        return rms_norm_reference(x, weight, eps, residual, delta)
    if residual is not None and not residual.is_contiguous():
        raise ValueError(f"rms_norm: residual's strides {residual.stride()} are not contiguous")
    out = torch.empty_like(x).contiguous()
    added = None if delta is None else delta.contiguous()
    return norm_rows(x.contiguous(), weight, eps, residual, out, added, delta_is_joined=delta_is_joined)
