"""What is allocated is what the memory plan counts; a latent layer's values are part of its keys."""

import pytest
import torch

from inference_service.execution.allocation import ALIGNMENT
from inference_service.execution.kv_cache import allocate_cache, block_bytes
from inference_service.models import LatentAttentionSpec, describe_model
from tests.support.golden import FIXTURES


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_block_bytes_are_those_allocated(model: str) -> None:
    """Over all layers, in a 16-bit dtype."""
    layers = [layer.attention for layer in describe_model(FIXTURES / "models" / model).spec.layers]
    dtype, blocks = torch.bfloat16, 5
    caches = allocate_cache(layers, blocks, 4, dtype, torch.device("cpu"), [None] * len(layers))
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() - ALIGNMENT
        for cache in caches
        for part in (cache.keys, cache.values)
    }
    assert sum(storages.values()) == (blocks + 1) * block_bytes(layers, 4, dtype)
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(layer, LatentAttentionSpec):
            assert cache.keys.shape == (blocks + 1, 4, 1, layer.latent_dim + layer.rope_dim)
            cache.keys.fill_(3.0)
            assert cache.values.shape[3] == layer.latent_dim
            assert bool((cache.values == 3.0).all())
