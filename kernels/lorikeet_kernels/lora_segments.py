"""Which LoRA slot each token of a step uses, and the tokens in slot order. Built once per step, passed to every op."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """A step's tokens by LoRA slot. Valid until the step's end; nothing here is ever written by an op.

    `order` lists the tokens with slot -1 first, then those of slot 0, 1, …, each in batch order; segment s
    (0 is the base model, s is slot s - 1) is `order[indptr[s]:indptr[s + 1]]`.
    """

    token_slot: torch.Tensor  # [T] int32, a slot or -1
    order: torch.Tensor  # [T] int32
    indptr: torch.Tensor  # [S + 2] int32
    num_slots: int


def make_lora_segments(token_slot: torch.Tensor, num_slots: int) -> LoraSegments:
    """Sort `token_slot` [T] int32 (a slot below `num_slots`, or -1) into segments, without a host sync."""
    if token_slot.dtype != torch.int32 or token_slot.dim() != 1:
        raise ValueError(
            f"token_slot is {token_slot.dtype} {tuple(token_slot.shape)}: pass one int32 slot a token, -1 for base"
        )
    order = torch.argsort(token_slot, stable=True).to(torch.int32)
    bounds = torch.arange(-1, num_slots + 1, dtype=torch.int32, device=token_slot.device)
    indptr = torch.searchsorted(token_slot.index_select(0, order), bounds, out_int32=True)
    return LoraSegments(token_slot, order, indptr, num_slots)
