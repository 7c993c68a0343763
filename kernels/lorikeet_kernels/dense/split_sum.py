"""Add up the parts that a projection leaves whose columns were split.

    y[t] = sum over splits s of parts[s, t] + bias

Shapes: parts [S, T, out] float32, bias [out], result [T, out]. Adds in float32, s ascending, rounds once.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

BLOCK = 512


def split_sum_reference(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `split_sum`."""
    total = parts.sum(dim=0)
    return out.copy_(total if bias is None else total + bias.float())


@triton.jit(do_not_specialize=["num_rows"])
def _split_sum_kernel(
    out_ptr, parts_ptr, bias_ptr, num_rows, width,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + num_rows.to(tl.int64) * s * width + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def split_sum(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Write the sum into `out` [T, out] and return it; at least one row, on a GPU or interpreted."""
    splits, num_rows, width = parts.shape
    on_gpu = out.device.type == "cuda"
    _split_sum_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        out, parts, out if bias is None else bias, num_rows, width,
        SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=BLOCK, PDL=on_gpu, num_warps=4,
        **({"launch_pdl": True} if on_gpu else {}),
    )  # fmt: skip
    return out
