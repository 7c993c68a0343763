"""The expert that every token passes, beside the routed ones."""

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.dense_mlp import DenseMlp
from inference_service.layers.linear import Linear
from lorikeet_kernels.dense.sigmoid import sigmoid


class SharedExpert:
    """An MLP, maybe weighted by the sigmoid of a projection to one number a token."""

    def __init__(self, mlp: DenseMlp, gate: Linear | None) -> None:
        self.mlp = mlp
        self.gate = gate

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """[T, H] to [T, H], a new tensor."""
        y = self.mlp(x, lora).whole()
        return y if self.gate is None else y * sigmoid(self.gate(x, lora))
