"""Which LoRA slot each token of a step uses. Built once per step, passed to every op."""

from dataclasses import dataclass

import torch

from lorikeet_kernels.lora.group_blocks import GroupBlocks, group_pairs
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.tiling.select import is_alone, select_block_m


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """A step's tokens by LoRA slot. Valid until the step's end; no op writes to it but for the workspace.

    `order` lists the tokens with slot -1 first, then those of slot 0, 1, …; segment s (0 is the base model, s
    is slot s - 1) is `order[indptr[s]:indptr[s + 1]]`. On a GPU both are made only where enough tokens share
    adapters: else kernels look up each token by itself, and then both are empty and `blocks` is None. Dense
    ops read the segments ahead of the launch before them: that one must not be what made them.
    """

    token_slot: torch.Tensor  # [T] int32, a slot or -1
    order: torch.Tensor  # [T] int32
    indptr: torch.Tensor  # [S + 2] int32
    num_slots: int
    workspace: LoraWorkspace
    blocks: GroupBlocks | None = None


def make_lora_segments(
    token_slot: torch.Tensor, num_slots: int, workspace: LoraWorkspace | None = None
) -> LoraSegments:
    """Sort `token_slot` [T] int32 (a slot below `num_slots`, or -1) into segments, without a host sync.

    Pass the same `workspace` at every step where ops run on a GPU: it is what they keep between launches.
    """
    if token_slot.dtype != torch.int32 or token_slot.dim() != 1:
        raise ValueError(
            f"token_slot is {token_slot.dtype} {tuple(token_slot.shape)}: pass an int32 slot a token, or -1"
        )
    workspace = workspace or LoraWorkspace(token_slot.device)
    num_tokens = token_slot.shape[0]
    if token_slot.device.type != "cpu":
        if is_alone(num_tokens, num_slots):
            nothing = token_slot[:0]
            return LoraSegments(token_slot, nothing, nothing, num_slots, workspace)
        block_m = select_block_m(num_tokens, 1, num_slots)
        blocks = group_pairs(None, token_slot, 1, num_slots, block_m, workspace)
        return LoraSegments(token_slot, blocks.order, blocks.starts, num_slots, workspace, blocks)
    if num_tokens:  # on a CPU alone: looking at a GPU's values would wait for it
        least, most = (int(end) for end in token_slot.aminmax())
        if least < -1 or most >= num_slots:
            raise ValueError(f"token_slot has slots {least} to {most}: pass -1 to {num_slots - 1}")
    order = torch.argsort(token_slot, stable=True).to(torch.int32)
    bounds = torch.arange(-1, num_slots + 1, dtype=torch.int32)
    indptr = torch.searchsorted(token_slot.index_select(0, order), bounds, out_int32=True)
    return LoraSegments(token_slot, order, indptr, num_slots, workspace)
