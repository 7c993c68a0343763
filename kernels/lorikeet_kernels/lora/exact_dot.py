"""Device code shared by the LoRA kernels: a product with a float32 rank vector on the tensor cores."""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def dot_exact(h, b, acc):
    """Acc + h @ b with h float32 and b in the compute dtype, h as a high and a low half of that dtype."""
    if b.dtype == tl.float32:
        acc = tl.dot(h, b, acc, input_precision="ieee")
    else:
        high = h.to(b.dtype)
        acc = tl.dot(high, b, acc)
        acc = tl.dot((h - high.to(tl.float32)).to(b.dtype), b, acc)
    return acc
