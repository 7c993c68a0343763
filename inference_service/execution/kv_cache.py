"""The paged key-value cache: a pair of tensors a layer, blocks shared by all layers' tables.

A layer of latent attention caches a row that serves as key and, its first part, as value: one tensor.
"""

from collections.abc import Sequence

import torch

from inference_service.execution.allocation import lazy_zeros
from inference_service.layers.batch import LayerCache
from inference_service.models import AnyAttentionSpec, LatentAttentionSpec, ModelConfigError
from lorikeet_kernels.attention.kv_scales import FP8, KvScales

# The first that converts e4m3 in hardware.
_FP8_CAPABILITY = (8, 9)


def cache_dtype(
    wanted: str, layers: Sequence[AnyAttentionSpec], dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """What the cache holds: `dtype` where "auto" is wanted, else e4m3.

    Raises:
        ModelConfigError: this model's or this device's cannot be FP8; the message says why.
    """
    if wanted == "auto":
        return dtype
    if any(isinstance(layer, LatentAttentionSpec) for layer in layers):
        raise ModelConfigError(
            f"kv_cache_dtype {wanted!r} scales keys and values, and this model caches latents; use auto"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ModelConfigError(
            f"kv_cache_dtype {wanted!r} needs a GPU of compute capability 8.9 or newer, and "
            f"{torch.cuda.get_device_name(device)} is older; use auto"
        )
    return FP8


def block_bytes(layers: Sequence[AnyAttentionSpec], block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return sum(layer.cached_elements for layer in layers) * block_tokens * dtype.itemsize


def allocate_cache(
    layers: Sequence[AnyAttentionSpec],
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: Sequence[KvScales | None],
) -> tuple[LayerCache, ...]:
    """Caches of `num_blocks` blocks and a spare one, the last, for rows that only pad a batch.

    `scales`, a pair or none a layer, belong to caches in FP8.
    """

    def cache(num_heads: int, width: int) -> torch.Tensor:
        return lazy_zeros((num_blocks + 1, block_tokens, num_heads, width), dtype, device)

    def of_layer(layer: AnyAttentionSpec, pair: KvScales | None) -> LayerCache:
        if isinstance(layer, LatentAttentionSpec):
            rows = cache(1, layer.cached_elements)
            return LayerCache(rows, rows[..., : layer.latent_dim])
        keys, values = (cache(layer.num_kv_heads, layer.head_dim) for _ in range(2))
        return LayerCache(keys, values, pair if dtype == FP8 else None)

    return tuple(of_layer(layer, pair) for layer, pair in zip(layers, scales, strict=True))
