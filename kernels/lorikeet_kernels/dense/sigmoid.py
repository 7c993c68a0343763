"""The sigmoid whose bits do not depend on where an element lies.

torch's on a CPU rounds the elements that a vector loop leaves over differently from the others (torch 2.13,
AVX-512: 2 of 64 values differ in the last bit), so that a row's bits follow from the number of rows. Its
exponential does not.
"""

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), elementwise, rounded once to x's dtype."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.exp(-x.float()).add_(1.0).reciprocal_().to(x.dtype)
