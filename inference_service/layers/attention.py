"""Self-attention over the paged cache."""

from dataclasses import dataclass

import torch

from inference_service.layers.batch import ForwardBatch, LayerCache
from inference_service.layers.head_steps import HeadStep
from inference_service.layers.linear import Linear
from inference_service.layers.projected import Projected
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
        head_steps: tuple[HeadStep, ...] = (),
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.qkv = qkv
        self.o = o
        self.rope_table = rope_table
        self.head_norm = head_norm
        self.head_steps = head_steps
        self.sinks = sinks

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> Projected:
        """Attend over `cache`, to which the batch's keys and values are added first. [T, H] to [T, H]."""
        shape = self.shape
        qkv = self.qkv.beside(x, batch.lora)
        if self.head_steps:
            qkv = Projected(qkv.whole())
        heads = qkv.y.view(x.shape[0], -1, shape.head_dim)  # [T, Hq + 2 Hkv, D]
        for step in self.head_steps:
            first_value = shape.num_heads + shape.num_kv_heads
            step(heads[:, : shape.num_heads], heads[:, shape.num_heads : first_value], batch.positions)
        norm, table = self.head_norm, self.rope_table
        q = attention_inputs(
            heads,
            cache.keys,
            cache.values,
            batch.attention.slot_mapping,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            positions=None if table is None else batch.positions,
            table=table,
            delta=None if qkv.delta is None else qkv.delta.view_as(heads),
            scales=cache.scales,
        )
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
