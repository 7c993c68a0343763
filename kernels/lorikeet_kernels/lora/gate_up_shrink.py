"""gate_up_shrink: h = A x for gate and up, per (token, expert) pair.

    sum over parts of h[part, p, 0, a, :R] = A[slot(t), site][expert(p), a*R:(a+1)*R, :] @ x[t],   p = t * K
    + k

x [T, H] compute dtype; A [E, num_a * R, H] in the arena; h [parts, T * K, 1, 2, Rmax] float32, written, never
rounded: a part is the product over a share of H. Entries beyond a pair's rank or num_a, and rows of pairs
without an adapter (slot -1, or rank 0), stay as they are.
"""

import torch

from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import pair_products, site_a, site_rank
from lorikeet_kernels.lora.moe_groups import MoeGroups
from lorikeet_kernels.lora.moe_shrink import launch_moe_shrink


def gate_up_shrink_reference(
    h: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """The op on CPU: one batched product for all pairs of a slot, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    for chosen in groups.slot_pairs:
        rank = site_rank(tables, chosen.slot, site)
        if rank == 0:
            continue
        a = site_a(tables, chosen.slot, site, x.shape[1], groups.num_experts)
        rows = x.index_select(0, chosen.tokens).float()
        product = pair_products(a.flatten(1, 2), chosen.experts, rows)
        h[0, :, 0, : a.shape[1], :rank].index_copy_(0, chosen.pairs, product.view(-1, a.shape[1], rank))
        h[1:, chosen.pairs, 0, : a.shape[1], :rank] = 0.0


def gate_up_shrink(
    h: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """Launch for grouped pairs; decode batches take `lorikeet_kernels.lora.pair_lora` instead."""
    if groups.blocks is None:
        gate_up_shrink_reference(h, x, topk_ids, groups, segments, tables, site)
        return
    launch_moe_shrink("gate_up", h, x, groups.blocks, tables, site, x_div=topk_ids.shape[1])
