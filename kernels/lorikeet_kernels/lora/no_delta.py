"""Device code shared by the LoRA kernels: the delta of a row without an adapter."""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

NO_DELTA = -0.0
"""Adding it changes no bit of any value; adding 0.0 would make a negative zero positive."""


@triton.jit
def no_delta(place):
    """NO_DELTA for each of the places, float32; by its bits: Triton takes a constant equal to zero for 0."""
    return tl.full(place.shape, -2147483648, tl.int32).to(tl.float32, bitcast=True)
