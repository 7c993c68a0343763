"""The batch as the model sees it: everything a step's forward pass needs, passed down by hand."""

from dataclasses import dataclass

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.kv_scales import KvScales
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.side_stream import SideStream


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's paged keys and values, [blocks, block_tokens, Hkv, D]; in FP8 with scales.

    Of latent attention a row is a latent and a rotated key, Hkv is 1, and the values are a view of the
    latents in `keys`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: KvScales | None = None


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """Which rows use which adapter. `is_active` False: no row has one, so layers skip the LoRA ops.

    `side` is where LoRA ops may run beside the base's.
    """

    segments: LoraSegments
    tables: LoraTables
    is_active: bool
    side: SideStream | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows of B requests, prefill chunks and decodes mixed.

    With `source_rows` some rows belong to no request: router t decides by the logits of row source_rows[t],
    so that these rows go where others go and touch no further expert.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: AttentionMetadata
    cache: tuple[LayerCache, ...]
    lora: LoraBatch
    source_rows: torch.Tensor | None = None  # [T] int64
