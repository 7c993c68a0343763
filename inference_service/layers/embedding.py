"""The input embedding with its LoRA site."""

import torch

from inference_service.layers.batch import LoraBatch
from lorikeet_kernels.dense.embedding import embedding
from lorikeet_kernels.lora.lora_embedding import lora_embedding


class Embedding:
    """Weight [V, H] and the table index of the site "embed"."""

    def __init__(self, weight: torch.Tensor, site: int) -> None:
        self.weight = weight
        self.site = site

    def __call__(self, token_ids: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        """Look `token_ids` [T] up: [T, H]."""
        x = embedding(token_ids, self.weight)
        if lora.is_active:
            lora_embedding(x, token_ids, lora.segments, lora.tables, self.site)
        return x
