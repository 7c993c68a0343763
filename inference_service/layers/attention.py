"""Self-attention over the paged cache."""

from dataclasses import dataclass

import torch

from inference_service.layers.batch import ForwardBatch, LayerCache
from inference_service.layers.linear import Linear
from inference_service.layers.projected import Projected
from inference_service.layers.projection_norm import ProjectionNorm
from lorikeet_kernels.attention.attention_inputs import attention_inputs
from lorikeet_kernels.attention.paged_attention import paged_attention


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer as this process holds them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norm of each query and key head, before the rotation or behind it; a row of weight for each head."""

    weight: torch.Tensor  # [Hq + Hkv, D], queries first
    eps: float
    norms_rotated: bool = False


@dataclass(frozen=True, slots=True)
class Positions:
    """What follows from a token's position; tables are the model's, which layers of equal parameters share.

    `rope_table` [P, 2, half] rotates neighbouring elements where `is_pairwise`, else a head's halves;
    `query_factors` [P] multiply the queries.
    """

    rope_table: torch.Tensor | None = None
    is_pairwise: bool = False
    query_factors: torch.Tensor | None = None


class Attention:
    """Fused q, k, v projection, norms, rotation, paged attention, output projection."""

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Linear,
        o: Linear,
        *,
        positions: Positions,
        head_norm: HeadNorm | None = None,
        projection_norm: ProjectionNorm | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.o = o
        self.positions = positions
        self.head_norm = head_norm
        self.projection_norm = projection_norm
        self.sinks = sinks

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Projected:
        """Attend over `cache`, to which the batch's keys and values are added first. [T, H] to [T, H]."""
        qkv = self.qkv.beside(x, batch.lora)
        q = self.prepare(qkv, cache, batch.attention.slot_mapping, batch.positions)
        shape = self.shape
        out = torch.empty((x.shape[0], shape.num_heads, shape.head_dim), dtype=x.dtype, device=x.device)
        paged_attention(
            q,
            cache.keys,
            cache.values,
            batch.attention,
            shape.scale,
            out,
            window=shape.window,
            chunk=shape.chunk,
            sinks=self.sinks,
            scales=cache.scales,
        )
        return self.o.beside(out.flatten(1), batch.lora)

    def prepare(
        self, qkv: Projected, cache: LayerCache, slot_mapping: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The queries [T, Hq, D] to attend with; keys and values are in the cache."""
        shape = self.shape
        if self.projection_norm is not None:
            qkv = Projected(qkv.whole())
        heads = qkv.y.view(qkv.y.shape[0], -1, shape.head_dim)  # [T, Hq + 2 Hkv, D]
        if self.projection_norm is not None:
            first_value = shape.num_heads + shape.num_kv_heads
            self.projection_norm(heads[:, : shape.num_heads], heads[:, shape.num_heads : first_value])
        norm, places = self.head_norm, self.positions
        return attention_inputs(
            heads,
            cache.keys,
            cache.values,
            slot_mapping,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            norms_rotated=norm is not None and norm.norms_rotated,
            positions=positions,
            table=places.rope_table,
            interleaved=places.is_pairwise,
            factors=places.query_factors,
            delta=None if qkv.delta is None else qkv.delta.view_as(heads),
            delta_is_joined=qkv.is_joined,
            scales=cache.scales,
        )
