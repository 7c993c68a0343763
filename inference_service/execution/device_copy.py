"""Small arrays on their way to the device or from it, without the host waiting for them."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the host, on `device`; for the work enqueued from now on.

    A copy from pageable memory would hold the host up. torch gives the pinned memory out again only once the
    copy has run.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the host; not to be read before an event recorded after this call has come.

    In pinned memory, or the host would wait for all work enqueued so far. On a CPU it is `tensor` itself.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
