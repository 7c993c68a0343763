"""gate_up_shrink: h = A x for gate and up, per (token, expert) pair.

    h[p, a, :R] = A[slot(t), site][expert(p), a*R:(a+1)*R, :] @ x[t],   p = t * K + k, a < num_a

x [T, H] compute dtype; A [E, num_a * R, H] in the arena; h [T * K, 2, Rmax] float32, written, never rounded.
Entries beyond a pair's rank or num_a, and rows of pairs without an adapter (slot -1, or rank 0), stay as they are.
"""

import torch

from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import site_a, site_rank
from lorikeet_kernels.moe_groups import MoeGroups


def gate_up_shrink_reference(
    h: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    """The op on CPU: one matmul per (expert, slot) group, accumulated in float32."""
    del topk_ids, segments  # groups say the same
    for group in groups.pair_groups:
        rank = site_rank(tables, group.slot, site)
        if rank == 0:
            continue
        a = site_a(tables, group.slot, site, x.shape[1], group.expert)
        rows = x.index_select(0, group.pairs // groups.top_k).to(torch.float32)
        product = rows @ a.reshape(-1, x.shape[1]).to(torch.float32).T
        h[group.pairs, : a.shape[0], :rank] = product.view(-1, a.shape[0], rank)


gate_up_shrink = gate_up_shrink_reference
