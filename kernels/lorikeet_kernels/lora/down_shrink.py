"""down_shrink: h = A act for the down projection, per (token, expert) pair.

    sum over parts of h[part, p, 0, 0, :R] = A[slot(t), site][expert(p)] @ act[t, k],   p = t * K + k

act [T, K, I] compute dtype; A [E, R, I] in the arena; h [parts, T * K, 1, 1, Rmax] float32, written, never
rounded: a part is the product over a share of I. Entries beyond a pair's rank and rows of pairs without an
adapter stay as they are.
"""

import torch

from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import pair_products, site_a, site_rank
from lorikeet_kernels.lora.moe_groups import MoeGroups
from lorikeet_kernels.lora.moe_shrink import launch_moe_shrink


def down_shrink_reference(
    h: torch.Tensor,
    act: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """The op on CPU: one batched product for all pairs of a slot, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    flat = act.view(-1, act.shape[2])
    for chosen in groups.slot_pairs:
        rank = site_rank(tables, chosen.slot, site)
        if rank == 0:
            continue
        a = site_a(tables, chosen.slot, site, act.shape[2], groups.num_experts)
        rows = flat.index_select(0, chosen.pairs).float()
        h[0, :, 0, 0, :rank].index_copy_(
            0, chosen.pairs, pair_products(a.flatten(1, 2), chosen.experts, rows)
        )
        h[1:, chosen.pairs, 0, 0, :rank] = 0.0


def down_shrink(
    h: torch.Tensor,
    act: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """Launch for grouped pairs; decode batches take `lorikeet_kernels.lora.pair_lora` instead."""
    if groups.blocks is None:
        down_shrink_reference(h, act, topk_ids, groups, segments, tables, site)
        return
    launch_moe_shrink("down", h, act, groups.blocks, tables, site, x_div=1)
