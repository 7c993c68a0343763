"""The device's name as tile tables are filed under."""

from functools import cache

import torch


@cache
def _name_of(index: int) -> str:
    return torch.cuda.get_device_name(index)


def device_name(tensor: torch.Tensor) -> str:
    """The GPU's name, or "cpu" (the interpreter in tests)."""
    if tensor.device.type == "cpu":
        return "cpu"
    return _name_of(tensor.get_device())
