"""Whether a device is of the one generation whose tensor core instructions some kernels are written in."""

from functools import cache

import torch

_MAJOR = 9


@cache
def _major_of(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def is_hopper(tensor: torch.Tensor) -> bool:
    """Whether its GPU has warpgroup MMAs, which came with Hopper and went with it.

    True where there is no GPU: the interpreter in tests knows them.
    """
    return tensor.device.type != "cuda" or _major_of(tensor.get_device()) == _MAJOR
