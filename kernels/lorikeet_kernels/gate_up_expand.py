"""gate_up_expand: out += B h for gate and up, per (token, expert) pair.

    out[t, k, n] += B[slot(t), site][expert(p), n, :] @ h[p, a(n), :R],   p = t * K + k

a(n) is 0 where the site has one A; else 0 for gate's columns and 1 for up's, by `row_order`. B [E, 2I, R] in the
arena, scaling included; h float32 as gate_up_shrink left it; out [T, K, 2I] compute dtype, in place: the sum is
float32 and rounded once. Rows of pairs without an adapter keep their bits.
"""

import torch

from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import add_rounded, site_b, site_num_a, site_rank
from lorikeet_kernels.moe_groups import MoeGroups
from lorikeet_kernels.row_order import RowOrder, slice_columns


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
    """The op on CPU: one or two matmuls per (expert, slot) group, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    num_columns = out.shape[2]
    flat = out.view(-1, num_columns)
    for group in groups.pair_groups:
        rank = site_rank(tables, group.slot, site)
        if rank == 0:
            continue
        b = site_b(tables, group.slot, site, num_columns, group.expert).to(torch.float32)
        num_a = site_num_a(tables, group.slot, site)
        rows = h.index_select(0, group.pairs)
        for index in range(num_a):
            columns = slice(0, num_columns) if num_a == 1 else slice_columns(row_order, num_columns, index)
            add_rounded(flat, group.pairs, columns, rows[:, index, :rank] @ b[columns].T)


gate_up_expand = gate_up_expand_reference
