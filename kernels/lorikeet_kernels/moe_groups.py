"""A layer's (token, expert) pairs grouped by expert and, within an expert, by LoRA slot.

Made once per layer and shared by the base expert GEMMs and the four LoRA ops. A pair is numbered token * K + k.
"""

from dataclasses import dataclass

import torch

from lorikeet_kernels.lora_segments import LoraSegments


@dataclass(frozen=True, slots=True)
class PairGroup:
    """The pairs of one (expert, slot), as the references walk them; host values."""

    expert: int
    slot: int
    pairs: torch.Tensor  # [n] int64, ascending


@dataclass(frozen=True, slots=True)
class MoeGroups:
    """Pairs ordered by (expert, slot), slot -1 first. Valid for one layer of one step.

    Expert e's pairs are `order[expert_indptr[e]:expert_indptr[e + 1]]`. `pair_groups` lists the groups that
    have an adapter; it is made on CPU only, where reading the ids costs no device sync.
    """

    order: torch.Tensor  # [T * K] int32
    expert_indptr: torch.Tensor  # [E + 1] int32
    num_experts: int
    top_k: int
    pair_groups: tuple[PairGroup, ...] = ()


def make_moe_groups(topk_ids: torch.Tensor, segments: LoraSegments, num_experts: int) -> MoeGroups:
    """Group `topk_ids` [T, K] int32 by (expert, slot). Nothing leaves the device; no host sync on a GPU."""
    num_tokens, top_k = topk_ids.shape
    if segments.token_slot.shape[0] != num_tokens:
        raise ValueError(
            f"topk_ids has {num_tokens} tokens and token_slot {segments.token_slot.shape[0]}: they must agree"
        )
    expert = topk_ids.reshape(-1).to(torch.int64)
    slot = segments.token_slot.to(torch.int64).repeat_interleave(top_k)
    key = expert * (segments.num_slots + 1) + slot + 1
    order = torch.argsort(key, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=torch.int64, device=topk_ids.device)
    expert_indptr = torch.searchsorted(expert.index_select(0, order), bounds, out_int32=True)
    groups = _pair_groups(key.index_select(0, order), order, segments.num_slots)
    return MoeGroups(order.to(torch.int32), expert_indptr, num_experts, top_k, groups)


def _pair_groups(sorted_key: torch.Tensor, order: torch.Tensor, num_slots: int) -> tuple[PairGroup, ...]:
    keys, counts = torch.unique_consecutive(sorted_key, return_counts=True)
    groups: list[PairGroup] = []
    start = 0
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        expert, segment = divmod(key, num_slots + 1)
        if segment > 0:
            groups.append(PairGroup(expert, segment - 1, order[start : start + count]))
        start += count
    return tuple(groups)
