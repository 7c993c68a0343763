"""The paged key-value cache: one pair of tensors a layer, blocks shared by all layers' tables."""

from collections.abc import Sequence

import torch

from inference_service.execution.allocation import lazy_zeros
from inference_service.layers.batch import LayerCache
from inference_service.models import AnyAttentionSpec


def block_bytes(layers: Sequence[AnyAttentionSpec], block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    per_token = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return per_token * block_tokens * dtype.itemsize


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

    return tuple(
        LayerCache(cache(layer.num_kv_heads, layer.key_dim), cache(layer.num_kv_heads, layer.value_dim))
        for layer in layers
    )
