"""Lorikeet's LoRA ops behind the interface by which implementations are timed against each other: `make(p)`.

A bench that compares implementations makes one input set `p` for all of them: activations, routing, the
tokens' slots, and weights as vLLM lays them out ([slots, E, rank, in] a slice). `make` returns callables:
`w13` and `w2` add the LoRA deltas in place, `prep` (None where there is nothing to prepare) runs before them.
Only weights are repacked here, into the arena's layout; all that depends on tokens happens in `prep`, which
is timed. The ops are the public functions that the engine calls.
"""

from collections.abc import Callable
from typing import Any

import torch

from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.lora.lora_segments import LoraSegments, make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.tiling import is_ungrouped

GATE_UP, DOWN = 0, 1
_WORKSPACES: dict[str, LoraWorkspace] = {}


def _pack(
    gate_up_a: list[torch.Tensor], gate_up_b: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> LoraTables:
    """One arena with each slot's gate_up A and B, then down's; two slices give two A side by side."""
    slots, _, rank, _ = a.shape
    num_a = len(gate_up_a)
    pieces: list[torch.Tensor] = []
    a_offset, b_offset = ([[0, 0] for _ in range(slots)] for _ in range(2))
    end = 0
    for slot in range(slots):
        stacked = (
            (a_offset, GATE_UP, torch.cat([part[slot] for part in gate_up_a], dim=1)),
            (b_offset, GATE_UP, torch.cat([part[slot] for part in gate_up_b], dim=1)),
            (a_offset, DOWN, a[slot]),
            (b_offset, DOWN, b[slot]),
        )
        for offsets, site, piece in stacked:
            offsets[slot][site] = end
            pieces.append(piece.reshape(-1))
            gap = -piece.numel() % 128
            pieces.append(torch.zeros(gap, dtype=a.dtype, device=a.device))
            end += piece.numel() + gap
    integers = {"dtype": torch.int32, "device": a.device}
    return LoraTables(
        arena=torch.cat(pieces),
        a_offset=torch.tensor(a_offset, dtype=torch.int64, device=a.device),
        b_offset=torch.tensor(b_offset, dtype=torch.int64, device=a.device),
        rank=torch.full((slots, 2), rank, **integers),
        num_a=torch.tensor([[num_a, 1]] * slots, **integers),
        max_rank=rank,
    )


def _tables(p: Any) -> LoraTables:
    # kept beside the weights it was made of, so that sets that share a layer share its arena
    if not hasattr(p.layer, "lorikeet_tables"):
        p.layer.lorikeet_tables = _pack(p.w13_a, p.w13_b, p.w2_a[0], p.w2_b[0])
    return p.layer.lorikeet_tables


def make(p: Any) -> dict[str, Any]:
    """See the module; `prep` groups the pairs where the ops want that."""
    tables = _tables(p)
    row_order: RowOrder = "interleaved" if p.slices == 1 else "concatenated"
    workspace = _WORKSPACES.setdefault(str(p.device), LoraWorkspace(p.x.device))
    out13 = p.out13.view(p.M, p.topk, -1)
    act = p.act.view(p.M, p.topk, p.I)
    none = p.token_lora[:0]
    state: dict[str, Any] = {
        "segments": LoraSegments(p.token_lora, none, none, p.max_loras, workspace),
        "groups": None,
    }
    ungrouped = is_ungrouped(p.topk_ids.numel(), p.E, p.max_loras)

    def prep() -> None:
        state["groups"] = make_moe_groups(p.topk_ids, state["segments"], p.E, state["groups"])

    def w13() -> None:
        moe_lora_gate_up(
            out13, p.x, p.topk_ids, state["groups"], state["segments"], tables, GATE_UP, row_order
        )

    def w2() -> None:
        moe_lora_down(p.out2, act, p.topk_ids, p.topk_w, state["groups"], state["segments"], tables, DOWN)

    steps: Callable[[], None] | None = None if ungrouped else prep
    if p.x.device.type == "cpu":
        state["segments"] = make_lora_segments(p.token_lora, p.max_loras, workspace)
        steps = prep
    if steps is not None:
        steps()
    path = "ungrouped" if ungrouped else "grouped"
    return {"w13": w13, "w2": w2, "prep": steps, "sub": None, "info": {"path": path}}
