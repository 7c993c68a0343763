"""The paged key-value cache: one pair of tensors a layer, blocks shared by all layers' tables."""

from collections.abc import Sequence

import torch

from inference_service.execution.allocation import lazy_zeros
from inference_service.layers.batch import LayerCache
from inference_service.models import AttentionSpec


def block_bytes(layers: Sequence[AttentionSpec], block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
    return per_token * block_tokens * dtype.itemsize


def allocate_cache(
    layers: Sequence[AttentionSpec],
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerCache, ...]:
    """Caches of `num_blocks` blocks and a spare one, the last, for rows that only pad a batch."""

    def cache(layer: AttentionSpec) -> torch.Tensor:
        shape = (num_blocks + 1, block_tokens, layer.num_kv_heads, layer.head_dim)
        return lazy_zeros(shape, dtype, device)

    return tuple(LayerCache(cache(layer), cache(layer)) for layer in layers)
