"""What attention needs to know of a batch, made once per step and shared by all layers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each request's queries lie in the batch and where its keys lie in the cache.

    Request b's queries are rows [query_starts[b], query_starts[b + 1]) and the last of its sequence of
    sequence_lens[b] tokens; the first rows of the batch belong to requests, rows beyond the last start are
    padding. A request of no tokens pads a batch of decodes: its row becomes zeros. The host copies spare the
    reference on a GPU a synchronisation; kernels read none, and what a graph reads has none.
    """

    query_starts: torch.Tensor  # [B + 1] int32
    sequence_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max blocks] int32
    slot_mapping: torch.Tensor  # [T] int64, where each row's key and value go
    query_starts_host: tuple[int, ...] | None = None
    sequence_lens_host: tuple[int, ...] | None = None
