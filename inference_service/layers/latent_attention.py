"""Multi-head latent attention: keys and values are projected up from a narrow latent (DeepSeek).

The cache holds each head's keys and values as projected, since an adapter on the up-projection makes them its
own: a latent in the cache would have to be projected again by every reader, with its request's adapter.
"""

from dataclasses import dataclass

import torch

from inference_service.layers.batch import ForwardBatch, LayerCache
from inference_service.layers.linear import Linear
from inference_service.layers.norm import RmsNorm
from inference_service.layers.projected import Projected
from lorikeet_kernels.attention.kv_write import kv_write
from lorikeet_kernels.attention.paged_attention import paged_attention
from lorikeet_kernels.attention.rotary import rotary


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one layer. A key has `plain_dim` elements of the head's own and `rope_dim` rotated ones."""

    num_heads: int
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    is_pairwise: bool


@dataclass(frozen=True, slots=True)
class LatentQuery:
    """The norm of the queries' latent and the projection up from it."""

    norm: RmsNorm
    up: Linear


class LatentAttention:
    """`down` makes [queries or their latent | keys' latent | shared rotated key]."""

    def __init__(
        self,
        shape: LatentShape,
        down: Linear,
        query: LatentQuery | None,
        kv_norm: RmsNorm,
        kv_up: Linear,
        o: Linear,
        *,
        rope_table: torch.Tensor,
    ) -> None:
        self.shape = shape
        self.down = down
        self.query = query
        self.kv_norm = kv_norm
        self.kv_up = kv_up
        self.o = o
        self.rope_table = rope_table

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Projected:
        """Attend over `cache`, to which the batch's keys and values are added first. [T, H] to [T, H]."""
        shape, num_tokens = self.shape, x.shape[0]
        down = self.down(x, batch.lora)
        num_query = down.shape[1] - shape.latent_dim - shape.rope_dim
        query, latent, shared_key = (
            part.contiguous() for part in down.split((num_query, shape.latent_dim, shape.rope_dim), dim=1)
        )
        if self.query is not None:
            query = self.query.up(self.query.norm(query), batch.lora)
        q = query.view(num_tokens, shape.num_heads, -1)
        shared = shared_key.view(num_tokens, 1, -1)
        for rotated in (q[..., shape.plain_dim :], shared):
            rotary(rotated, batch.positions, self.rope_table, interleaved=shape.is_pairwise)
        up = self.kv_up(self.kv_norm(latent), batch.lora).view(num_tokens, shape.num_heads, -1)
        plain, values = up.split((shape.plain_dim, shape.value_dim), dim=2)
        keys = torch.cat((plain, shared.expand(-1, shape.num_heads, -1)), dim=2)
        kv_write(keys, values, cache.keys, cache.values, batch.attention.slot_mapping)
        out = torch.empty((num_tokens, shape.num_heads, shape.value_dim), dtype=x.dtype, device=x.device)
        paged_attention(q, cache.keys, cache.values, batch.attention, shape.scale, out)
        return self.o.beside(out.flatten(1), batch.lora)
