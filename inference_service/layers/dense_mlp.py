"""The gated MLP of dense layers."""

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.linear import Linear
from lorikeet_kernels.dense.gated_activation import gated_activation


class DenseMlp:
    """Fused gate and up projection [gate | up], activation, down projection."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """[T, H] to [T, H]."""
        return self.down(gated_activation(self.gate_up(x, lora)), lora)
