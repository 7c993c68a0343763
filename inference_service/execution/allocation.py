"""Large long-lived buffers: zeroed, aligned, and on a CPU touched only when used."""

import math

import numpy as np
import torch

ALIGNMENT = 256


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose start is aligned to 256 bytes.

    On a CPU the memory comes from calloc, so that a cache sized for the worst case costs only what is used;
    torch.zeros would write all of it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)  # the GPU allocator aligns to 512
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).view(shape)
