"""The gated activation between an MLP's two matrices.

    y = silu(gate) * up,   silu(g) = g / (1 + exp(-g))

Shapes: gate_up [..., 2I], out [..., I]. Rows hold [gate | up], or g0, u0, g1, u1, ... with `interleaved`.
Computes in float32, rounds once.
"""

import torch
from torch.nn import functional as F


def silu_mul_reference(gate_up: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """See `silu_mul`."""
    if interleaved:
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def silu_mul(gate_up: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Return the activation of `gate_up`."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: last dimension of {tuple(gate_up.shape)} is odd")
    return silu_mul_reference(gate_up, interleaved=interleaved)
