"""The gated activation between an MLP's two matrices.

    y = g / (1 + exp(-alpha g)) * (u + up_offset)

g is the gate and u is up; with a limit, first g = min(g, limit) and u = min(max(u, -limit), limit). The
defaults are silu(gate) * up.

Shapes: gate_up [..., 2I], out [..., I]. Rows hold [gate | up], or g0, u0, g1, u1, ... where `row_order` is
"interleaved". Computes in float32, rounds once. A NaN stays one: a minimum or maximum that drops it would
hide a broken request.
"""

from dataclasses import dataclass

import torch

from lorikeet_kernels.row_order import RowOrder, slice_columns


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The constants of a model's gated activation; see this module's docstring."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


SILU = GatedActivation()


def gated_activation_reference(
    gate_up: torch.Tensor, activation: GatedActivation = SILU, *, row_order: RowOrder = "concatenated"
) -> torch.Tensor:
    """See `gated_activation`."""
    width = gate_up.shape[-1]
    gate, up = (gate_up[..., slice_columns(row_order, width, index)].float() for index in range(2))
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    gated = gate * torch.sigmoid(activation.alpha * gate)
    return (gated * (up + activation.up_offset)).to(gate_up.dtype)


def gated_activation(
    gate_up: torch.Tensor, activation: GatedActivation = SILU, *, row_order: RowOrder = "concatenated"
) -> torch.Tensor:
    """Return the activation of `gate_up`, a new tensor."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gated_activation: last dimension of {tuple(gate_up.shape)} is odd")
    return gated_activation_reference(gate_up, activation, row_order=row_order)
