"""The gated MLP of dense layers."""

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.linear import Linear
from inference_service.layers.projected import Projected
from lorikeet_kernels.dense.gated_activation import gated_activation


class DenseMlp:
    """Fused gate and up projection [gate | up], activation, down projection."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> Projected:
        """[T, H] to [T, H]."""
        return self.down.beside(self.activate(self.gate_up.beside(x, lora)), lora)

    def activate(self, gate_up: Projected) -> torch.Tensor:
        """[T, 2I] to [T, I]."""
        return gated_activation(gate_up.y, delta=gate_up.delta, delta_is_joined=gate_up.is_joined)
