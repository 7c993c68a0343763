"""A step's small arrays on their way to the device, without the host waiting for it."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the host, on `device`; for the work enqueued from now on.

    A copy from pageable memory would hold the host up. torch gives the pinned memory out again only once the
    copy has run.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
