"""gate_up_expand: out += B h for gate and up, per (token, expert) pair.

    out[t, k, n] += B[slot(t), site][expert(p), n, :] @ sum over parts of h[part, p, 0, a(n), :R],   p = t *
    K + k

a(n) is 0 where the site has one A; else 0 for gate's columns and 1 for up's, by `row_order`. B [E, 2I, R] in
the arena, scaling included; h float32 as gate_up_shrink left it; out [T, K, 2I] compute dtype, in place: the
sum is float32 and rounded once. Rows of pairs without an adapter keep their bits.
"""

import torch

from lorikeet_kernels.dense.row_order import RowOrder, slice_columns
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.grouped_expand import grouped_expand
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import (
    add_rounded,
    pair_products,
    site_b,
    site_num_a,
    site_rank,
    sum_parts,
)
from lorikeet_kernels.lora.moe_groups import MoeGroups
from lorikeet_kernels.lora.output_lanes import gate_up_lanes
from lorikeet_kernels.tiling import OpShape, select_expand


def gate_up_expand_reference(
    out: torch.Tensor,
    h: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    row_order: RowOrder,
) -> None:
    """The op on CPU: one or two batched products for all pairs of a slot, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    num_columns = out.shape[2]
    flat = out.view(-1, num_columns)
    for chosen in groups.slot_pairs:
        rank = site_rank(tables, chosen.slot, site)
        if rank == 0:
            continue
        b = site_b(tables, chosen.slot, site, num_columns, groups.num_experts)
        num_a = site_num_a(tables, chosen.slot, site)
        rows = sum_parts(h, chosen.pairs)
        for index in range(num_a):
            columns = slice(0, num_columns) if num_a == 1 else slice_columns(row_order, num_columns, index)
            delta = pair_products(b[:, columns], chosen.experts, rows[:, index, :rank])
            add_rounded(flat, chosen.pairs, columns, delta)


def gate_up_expand(
    out: torch.Tensor,
    h: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    row_order: RowOrder,
) -> None:
    """Launch for grouped pairs, dependent on gate_up_shrink's."""
    if groups.blocks is None:
        gate_up_expand_reference(out, h, topk_ids, groups, segments, tables, site, row_order)
        return
    shape = OpShape("gate_up", 0, out.shape[2], tables.max_rank, topk_ids.numel())
    grouped_expand(
        out,
        h,
        None,
        groups.blocks,
        tables,
        (site, site, site),
        gate_up_lanes(out.shape[2], row_order),
        select_expand(shape, groups.blocks.block_m, device_name(out)),
        interleaved=row_order == "interleaved",
    )
