"""The paged key-value cache: a pair of tensors a layer, blocks shared by all layers' tables.

A layer of latent attention caches a row that serves as key and, its first part, as value: one tensor.
"""

from collections.abc import Sequence

import torch

from inference_service.execution.allocation import lazy_zeros
from inference_service.layers.batch import LayerCache
from inference_service.models import AnyAttentionSpec, LatentAttentionSpec


def block_bytes(layers: Sequence[AnyAttentionSpec], block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return sum(layer.cached_elements for layer in layers) * block_tokens * dtype.itemsize


def allocate_cache(
    layers: Sequence[AnyAttentionSpec],
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerCache, ...]:
    """Caches of `num_blocks` blocks and a spare one, the last, for rows that only pad a batch."""

    def cache(num_heads: int, width: int) -> torch.Tensor:
        return lazy_zeros((num_blocks + 1, block_tokens, num_heads, width), dtype, device)

    def of_layer(layer: AnyAttentionSpec) -> LayerCache:
        if isinstance(layer, LatentAttentionSpec):
            rows = cache(1, layer.cached_elements)
            return LayerCache(rows, rows[..., : layer.latent_dim])
        return LayerCache(*(cache(layer.num_kv_heads, layer.head_dim) for _ in range(2)))

    return tuple(of_layer(layer) for layer in layers)
