"""A layer's (token, expert) pairs grouped by expert and, within an expert, by LoRA slot.

Made once per layer and shared by the base expert GEMMs and the four LoRA ops. A pair is numbered token * K +
k.
"""

from dataclasses import dataclass

import numpy as np
import torch

from lorikeet_kernels.lora.group_blocks import GroupBlocks, group_pairs
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.tiling import select_block_m


@dataclass(frozen=True, slots=True)
class SlotPairs:
    """The pairs of one LoRA slot, by expert, as the references walk them."""

    slot: int
    experts: torch.Tensor  # [n] int64, ascending
    pairs: torch.Tensor  # [n] int64
    tokens: torch.Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class MoeGroups:
    """Pairs ordered by (expert, slot), slot -1 first. Valid for one layer of one step.

    Expert e's pairs are `order[expert_indptr[e]:expert_indptr[e + 1]]`, in no given order within a (expert,
    slot) on a GPU. `slot_pairs` lists the pairs that have an adapter; it is made on CPU only, where reading
    the ids costs no device sync. `blocks` cuts the groups for the GPU's kernels.
    """

    order: torch.Tensor  # [T * K] int64 on CPU, int32 on a GPU
    expert_indptr: torch.Tensor  # [E + 1] int32
    num_experts: int
    top_k: int
    slot_pairs: tuple[SlotPairs, ...] = ()
    blocks: GroupBlocks | None = None


def make_moe_groups(
    topk_ids: torch.Tensor, segments: LoraSegments, num_experts: int, reuse: MoeGroups | None = None
) -> MoeGroups:
    """Group `topk_ids` [T, K] int32 by (expert, slot). Nothing leaves the device; no host sync on a GPU.

    On a GPU decode batches need no groups for their adapters: call it there for the base GEMMs' sake alone,
    or pass None to the LoRA ops (`lorikeet_kernels.tiling.is_ungrouped` says when). `reuse`, groups of an
    earlier batch of the same sizes, is overwritten there instead of allocating.
    """
    num_tokens, top_k = topk_ids.shape
    if segments.token_slot.shape[0] != num_tokens:
        raise ValueError(
            f"topk_ids has {num_tokens} tokens and token_slot {segments.token_slot.shape[0]}: they must agree"
        )
    if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids is {topk_ids.dtype}, strides {topk_ids.stride()}: pass contiguous int32")
    if topk_ids.device.type != "cpu":
        block_m = select_block_m(topk_ids.numel(), num_experts, segments.num_slots)
        blocks = group_pairs(
            topk_ids,
            segments.token_slot,
            num_experts,
            segments.num_slots,
            block_m,
            segments.workspace,
            reuse.blocks if reuse else None,
        )
        return MoeGroups(
            blocks.order, blocks.starts[:: segments.num_slots + 1], num_experts, top_k, (), blocks
        )
    return _make_on_cpu(topk_ids, segments, num_experts)


def _make_on_cpu(topk_ids: torch.Tensor, segments: LoraSegments, num_experts: int) -> MoeGroups:
    # numpy shares the tensors' memory and costs a third of torch's per-op overhead at a decode step's sizes
    top_k = topk_ids.shape[1]
    expert = topk_ids.numpy().reshape(-1).astype(np.int64)
    if expert.size and (expert.min() < 0 or expert.max() >= num_experts):
        raise ValueError(
            f"topk_ids has experts {expert.min()} to {expert.max()}: pass 0 to {num_experts - 1}"
        )
    slot = np.repeat(segments.token_slot.numpy(), top_k)
    order = np.argsort(expert * (segments.num_slots + 1) + slot + 1, kind="stable")
    sorted_expert = expert[order]
    indptr = np.searchsorted(sorted_expert, np.arange(num_experts + 1)).astype(np.int32)
    sorted_slot = slot[order]
    chosen: list[SlotPairs] = []
    for used in np.unique(slot[slot >= 0]).tolist():
        here = np.flatnonzero(sorted_slot == used)
        pairs = order[here]
        chosen.append(
            SlotPairs(
                used,
                torch.from_numpy(sorted_expert[here]),
                torch.from_numpy(pairs),
                torch.from_numpy(pairs // top_k),
            )
        )
    return MoeGroups(torch.from_numpy(order), torch.from_numpy(indptr), num_experts, top_k, tuple(chosen))
