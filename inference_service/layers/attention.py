"""Self-attention over the paged cache."""

from dataclasses import dataclass

import torch

from inference_service.layers.batch import ForwardBatch, LayerCache
from inference_service.layers.linear import Linear
from lorikeet_kernels.head_norm import head_norm
from lorikeet_kernels.kv_write import kv_write
from lorikeet_kernels.paged_attention import paged_attention
from lorikeet_kernels.rotary import rotary


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer as this process holds them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norm of each query and key head before the rotation; a row of weight for each head, queries first."""

    weight: torch.Tensor  # [Hq + Hkv, D]
    eps: float


class Attention:
    """Fused q, k, v projection, head norm, rotation, paged attention, output projection.

    `rope_table` is the model's, [P, 2, half]; layers of equal rotary parameters share one.
    """

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Linear,
        o: Linear,
        *,
        rope_table: torch.Tensor | None,
        head_norm: HeadNorm | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.o = o
        self.rope_table = rope_table
        self.head_norm = head_norm
        self.sinks = sinks

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> torch.Tensor:
        """Attend over `cache`, to which the batch's keys and values are added first. [T, H] to [T, H]."""
        shape = self.shape
        heads = self.qkv(x, batch.lora).view(x.shape[0], -1, shape.head_dim)  # [T, Hq + 2 Hkv, D]
        num_rotated = shape.num_heads + shape.num_kv_heads
        q_and_k = heads[:, :num_rotated]
        if self.head_norm is not None:
            head_norm(q_and_k, self.head_norm.weight, self.head_norm.eps)
        if self.rope_table is not None:
            rotary(q_and_k, batch.positions, self.rope_table)
        q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        kv_write(k, v, cache.keys, cache.values, batch.attention.slot_mapping)
        out = torch.empty((x.shape[0], shape.num_heads, shape.head_dim), dtype=x.dtype, device=x.device)
        paged_attention(
            q,
            cache.keys,
            cache.values,
            batch.attention,
            shape.scale,
            out,
            window=shape.window,
            sinks=self.sinks,
        )
        return self.o(out.flatten(1), batch.lora)
