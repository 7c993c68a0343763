"""Random batches over paged caches, whose unused places are NaN: for tests and small cases."""

from collections.abc import Sequence

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.benchmarking.latent_problem import SPARE_BLOCKS


def make_paged_caches(
    shares: Sequence[tuple[int, int]],
    *,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    block_tokens: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Keys and values of `dims`, on the CPU.

    `shares` are each request's tokens computed before and in this batch; its blocks are shuffled.
    """
    lengths = [sum(share) for share in shares]
    counts = [-(-length // block_tokens) for length in lengths]
    num_blocks = sum(counts) + SPARE_BLOCKS
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros((len(shares), max(1, *counts)), dtype=torch.int32)
    caches = [
        torch.full((num_blocks, block_tokens, kv_heads, dim), float("nan"), dtype=dtype) for dim in dims
    ]
    starts = [0]
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[b, :count] = torch.tensor([free.pop() for _ in range(count)])
        position = torch.arange(length)
        where = tables[b, position // block_tokens].long(), position % block_tokens
        for cache in caches:
            cache[where] = torch.randn((length, *cache.shape[2:]), generator=generator).to(dtype)
        starts.append(starts[-1] + shares[b][1])
    metadata = AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        sequence_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        query_starts_host=tuple(starts),
        sequence_lens_host=tuple(lengths),
    )
    return caches[0], caches[1], metadata
