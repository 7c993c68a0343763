"""Write a step's keys and values into the paged cache.

    key_cache[slot // block_tokens, slot % block_tokens] = k[t]   for slot = slot_mapping[t]; values alike

Shapes: k [T, Hkv, Dk], v [T, Hkv, Dv], views are fine; key_cache [blocks, block_tokens, Hkv, Dk] and
value_cache [blocks, block_tokens, Hkv, Dv] of k's dtype, or of FP8 with `scales`; slot_mapping [T] int64.
Rounds only to FP8 (`kv_scales`). Every slot is valid: rows that only pad the batch point into a spare block
which no block table names.
"""

import torch

from lorikeet_kernels.attention.kv_scales import KvScales, check_scales, quantize_heads


def kv_write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KvScales | None = None,
) -> None:
    """See `kv_write`."""
    if scales is not None:
        # Moved as bytes: torch has no index_copy_ of FP8.
        k, v = (quantize_heads(x, of).view(torch.uint8) for x, of in ((k, scales.keys), (v, scales.values)))
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scales: KvScales | None = None,
) -> None:
    """Write `k` and `v` into the caches, in place."""
    if k.shape[1:] != key_cache.shape[2:] or v.shape[1:] != value_cache.shape[2:]:
        raise ValueError(
            f"kv_write: rows {tuple(k.shape)} and {tuple(v.shape)} do not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    check_scales("kv_write", key_cache, value_cache, scales)
    kv_write_reference(k, v, key_cache, value_cache, slot_mapping, scales=scales)
