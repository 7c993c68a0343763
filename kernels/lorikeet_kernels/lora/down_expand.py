"""down_expand: out += w B h for the down projection, per (token, expert) pair.

    out[t, k, n] += topk_weights[t, k] * (B[slot(t), site][expert(p), n, :] @ sum over parts of h[part, p, 0,
    0, :R])

p = t * K + k; B [E, H, R] in the arena, scaling included; h float32 as down_shrink left it; out [T, K, H]
compute dtype, in place: the sum is float32 and rounded once. Rows of pairs without an adapter keep their
bits.
"""

import torch

from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.grouped_expand import grouped_expand
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import add_rounded, pair_products, site_b, site_rank, sum_parts
from lorikeet_kernels.lora.moe_groups import MoeGroups
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.tiling import OpShape, select_expand


def down_expand_reference(
    out: torch.Tensor,
    h: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """The op on CPU: one batched product for all pairs of a slot, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    num_columns = out.shape[2]
    flat = out.view(-1, num_columns)
    weights = topk_weights.view(-1, 1)
    for chosen in groups.slot_pairs:
        rank = site_rank(tables, chosen.slot, site)
        if rank == 0:
            continue
        b = site_b(tables, chosen.slot, site, num_columns, groups.num_experts)
        rows = sum_parts(h, chosen.pairs)[:, 0, :rank] * weights.index_select(0, chosen.pairs)
        add_rounded(flat, chosen.pairs, slice(0, num_columns), pair_products(b, chosen.experts, rows))


def down_expand(
    out: torch.Tensor,
    h: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """Launch for grouped pairs, dependent on down_shrink's."""
    if groups.blocks is None:
        down_expand_reference(out, h, topk_ids, topk_weights, groups, segments, tables, site)
        return
    width = out.shape[2]
    shape = OpShape("down", 0, width, tables.max_rank, topk_ids.numel())
    tiles = select_expand(shape, groups.blocks.block_m, device_name(out))
    lanes = site_lanes((width,), (1,))
    grouped_expand(out, h, topk_weights, groups.blocks, tables, (site, site, site), lanes, tiles)
