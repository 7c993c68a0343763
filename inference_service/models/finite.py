"""Whether all of a tensor's values are numbers: neither infinities nor NaNs."""

import math

import numpy as np
import torch

# The bits of infinity. All that is not finite lies at or above them, among patterns of the same sign.
_INFINITY = {
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}


def is_finite(tensor: torch.Tensor) -> bool:
    """In one or two passes at the speed of memory; `torch.isfinite` makes masks and takes many times as long.

    In host memory on the caller's thread alone: torch's reductions would start threads of their own for each
    reader. On a device it waits for the answer.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float8_e4m3fn:
        return all(map(math.isfinite, extremes(tensor).tolist()))
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in _INFINITY:
        signed, unsigned, infinity = _INFINITY[tensor.dtype]
        # As signed integers the largest is a positive number, as unsigned ones a negative number.
        bits = tensor.view(-1).view(torch.uint8).numpy().view(signed)
        sign = 1 << (8 * bits.itemsize - 1)
        return int(bits.max()) < infinity and int(bits.view(unsigned).max()) < infinity + sign
    return all(map(math.isfinite, extremes(tensor).tolist()))


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Smallest and largest value [2] float64, on the tensor's device; a NaN anywhere becomes both."""
    if tensor.dtype == torch.float8_e4m3fn:
        # Its NaNs are the largest code of each sign, and it has no infinities.
        codes = torch.stack((tensor.view(torch.int8).amax() == 127, tensor.view(torch.uint8).amax() == 255))
        return torch.where(codes.any(), math.nan, 0.0).double().expand(2)
    return torch.stack(torch.aminmax(tensor)).double()
