"""The expert that every token passes, beside the routed ones."""

import torch

from inference_service.layers.batch import LoraBatch
from inference_service.layers.dense_mlp import DenseMlp
from inference_service.layers.linear import Linear
from lorikeet_kernels.dense.sigmoid import sigmoid
from lorikeet_kernels.experts.moe_sum import SharedRows


class SharedExpert:
    """An MLP, maybe weighted by the sigmoid of a projection to one number a token."""

    def __init__(self, mlp: DenseMlp, gate: Linear | None) -> None:
        self.mlp = mlp
        self.gate = gate

    def __call__(self, x: torch.Tensor, lora: LoraBatch) -> SharedRows:
        """[T, H] to [T, H], new tensors."""
        made = self.mlp(x, lora)
        if self.gate is None:
            return SharedRows(made.y, made.delta)
        return SharedRows(made.whole() * sigmoid(self.gate(x, lora)))
