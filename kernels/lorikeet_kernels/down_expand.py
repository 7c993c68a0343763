"""down_expand: out += w B h for the down projection, per (token, expert) pair.

    out[t, k, n] += topk_weights[t, k] * (B[slot(t), site][expert(p), n, :] @ h[p, 0, :R]),   p = t * K + k

B [E, H, R] in the arena, scaling included; h float32 as down_shrink left it; out [T, K, H] compute dtype, in place:
the sum is float32 and rounded once. Rows of pairs without an adapter keep their bits.
"""

import torch

from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import add_rounded, site_b, site_rank
from lorikeet_kernels.moe_groups import MoeGroups


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
    """The op on CPU: one matmul per (expert, slot) group, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    num_columns = out.shape[2]
    flat = out.view(-1, num_columns)
    weights = topk_weights.view(-1, 1)
    for group in groups.pair_groups:
        rank = site_rank(tables, group.slot, site)
        if rank == 0:
            continue
        b = site_b(tables, group.slot, site, num_columns, group.expert).to(torch.float32)
        rows = h.index_select(0, group.pairs)[:, 0, :rank] * weights.index_select(0, group.pairs)
        add_rounded(flat, group.pairs, slice(0, num_columns), rows @ b.T)


down_expand = down_expand_reference
