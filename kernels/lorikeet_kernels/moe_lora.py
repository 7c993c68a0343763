"""The LoRA branch of a MoE layer: shrink and expand for gate_up and for down, composed for layers.moe."""

import torch

from lorikeet_kernels.down_expand import down_expand
from lorikeet_kernels.down_shrink import down_shrink
from lorikeet_kernels.gate_up_expand import gate_up_expand
from lorikeet_kernels.gate_up_shrink import gate_up_shrink
from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import largest_rank
from lorikeet_kernels.moe_groups import MoeGroups
from lorikeet_kernels.row_order import RowOrder


def moe_lora_gate_up(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    row_order: RowOrder,
) -> None:
    """`out` [T, K, 2I] += each pair's gate_up adapter applied to `x` [T, H]; rows of slot -1 keep their bits."""
    _check(out, x, topk_ids, tables)
    rank = largest_rank(tables, site)
    if rank == 0:
        return
    h = torch.empty((topk_ids.numel(), 2, rank), dtype=torch.float32, device=x.device)
    gate_up_shrink(h, x, topk_ids, groups, segments, tables, site)
    gate_up_expand(out, h, topk_ids, groups, segments, tables, site, row_order)


def moe_lora_down(
    out: torch.Tensor,
    act: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """`out` [T, K, H] += topk_weights times each pair's down adapter applied to `act` [T, K, I]."""
    _check(out, act, topk_ids, tables)
    rank = largest_rank(tables, site)
    if rank == 0:
        return
    h = torch.empty((topk_ids.numel(), 1, rank), dtype=torch.float32, device=act.device)
    down_shrink(h, act, topk_ids, groups, segments, tables, site)
    down_expand(out, h, topk_ids, topk_weights, groups, segments, tables, site)


def _check(out: torch.Tensor, x: torch.Tensor, topk_ids: torch.Tensor, tables: LoraTables) -> None:
    num_tokens, top_k = topk_ids.shape
    if topk_ids.dtype != torch.int32:
        raise ValueError(f"topk_ids is {topk_ids.dtype}: pass int32")
    if out.shape[:2] != (num_tokens, top_k) or not out.is_contiguous():
        raise ValueError(
            f"out {tuple(out.shape)} must be contiguous with one row a pair of topk_ids {tuple(topk_ids.shape)}"
        )
    if x.shape[0] != num_tokens or not x.is_contiguous():
        raise ValueError(
            f"input {tuple(x.shape)} must be contiguous with {num_tokens} tokens, as topk_ids has"
        )
    if not out.dtype == x.dtype == tables.arena.dtype:
        raise ValueError(
            f"out {out.dtype}, input {x.dtype} and arena {tables.arena.dtype} differ: all carry the compute dtype"
        )
