"""down_shrink: h = A act for the down projection, per (token, expert) pair.

    h[p, 0, :R] = A[slot(t), site][expert(p)] @ act[t, k],   p = t * K + k

act [T, K, I] compute dtype; A [E, R, I] in the arena; h [T * K, 1, Rmax] float32, written, never rounded.
Entries beyond a pair's rank and rows of pairs without an adapter stay as they are.
"""

import torch

from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import site_a, site_rank
from lorikeet_kernels.moe_groups import MoeGroups


def down_shrink_reference(
    h: torch.Tensor,
    act: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """The op on CPU: one matmul per (expert, slot) group, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    flat = act.view(-1, act.shape[2])
    for group in groups.pair_groups:
        rank = site_rank(tables, group.slot, site)
        if rank == 0:
            continue
        a = site_a(tables, group.slot, site, act.shape[2], group.expert)[0]
        rows = flat.index_select(0, group.pairs).to(torch.float32)
        h[group.pairs, 0, :rank] = rows @ a.to(torch.float32).T


down_shrink = down_shrink_reference
