"""Compile what a model's LoRA ops can ever launch, before the first request. GPU only; once per process.

Tiles change with the number of tokens and nothing else does (ranks, slots, sites and lengths are run-time
values), so one launch for each distinct choice of tiles covers all batches up to `max_tokens`.
"""

import torch

from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.lora.group_blocks import block_capacity
from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.tiling import (
    OpShape,
    is_alone,
    is_segmented,
    is_ungrouped,
    select_block_m,
    select_expand,
    select_pair,
    select_segment,
    select_shrink,
    select_wide_segment,
)


def warm_up_moe(
    tables: LoraTables,
    workspace: LoraWorkspace,
    *,
    hidden: int,
    inner: int,
    num_experts: int,
    top_k: int,
    gate_up_site: int,
    down_site: int,
    row_order: RowOrder,
    max_tokens: int,
    grouped_only: bool = False,
) -> int:
    """Launch each distinct kernel of a MoE layer's LoRA branch on base-only rows; returns how many.

    With `grouped_only` batches are left out whose pairs go ungrouped: where `moe_experts` runs the layer,
    their deltas are made there, by kernels that `warm_up_experts` launches.
    """
    device, dtype = tables.arena.device, tables.arena.dtype
    name = torch.cuda.get_device_name(device)
    num_slots, rank = tables.rank.shape[0], tables.max_rank
    seen: set[object] = set()
    for num_tokens in range(1, max_tokens + 1):
        pairs = num_tokens * top_k
        up = OpShape("gate_up", hidden, 2 * inner, rank, pairs)
        down = OpShape("down", inner, hidden, rank, pairs)
        if is_ungrouped(pairs, num_experts, num_slots):
            if grouped_only:
                continue
            choice: object = (select_pair(up, name), select_pair(down, name))
        else:
            block_m = select_block_m(pairs, num_experts, num_slots)
            choice = (
                block_m,
                *(
                    select(shape, block_m, name)
                    for select in (select_shrink, select_expand)
                    for shape in (up, down)
                ),
            )
        if choice in seen:
            continue
        seen.add(choice)
        segments = make_lora_segments(
            torch.full((num_tokens,), -1, dtype=torch.int32, device=device), num_slots, workspace
        )
        ids = torch.zeros((num_tokens, top_k), dtype=torch.int32, device=device)
        groups = make_moe_groups(ids, segments, num_experts)
        x = torch.zeros((num_tokens, hidden), dtype=dtype, device=device)
        act = torch.zeros((num_tokens, top_k, inner), dtype=dtype, device=device)
        out = torch.zeros((num_tokens, top_k, 2 * inner), dtype=dtype, device=device)
        out_down = torch.zeros((num_tokens, top_k, hidden), dtype=dtype, device=device)
        weights = torch.zeros((num_tokens, top_k), dtype=torch.float32, device=device)
        moe_lora_gate_up(out, x, ids, groups, segments, tables, gate_up_site, row_order)
        moe_lora_down(out_down, act, ids, weights, groups, segments, tables, down_site)
    return len(seen)


def warm_up_linear(
    tables: LoraTables,
    workspace: LoraWorkspace,
    *,
    in_features: int,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...] | None,
    max_tokens: int,
    beside_tokens: range = range(0),
) -> int:
    """As `warm_up_moe`, for one fused dense projection; batches of `beside_tokens` also beside the base's."""
    device, dtype = tables.arena.device, tables.arena.dtype
    name = torch.cuda.get_device_name(device)
    num_slots, rank = tables.rank.shape[0], tables.max_rank
    seen: set[object] = set()
    for num_tokens in range(1, max_tokens + 1):
        shape = OpShape("linear", in_features, sum(out_features), rank, num_tokens)
        block_m = select_block_m(num_tokens, 1, num_slots)
        if is_alone(num_tokens, num_slots):
            choice: object = ("pair", select_pair(shape, name))
        elif is_segmented(num_tokens, block_capacity(num_tokens, 1, num_slots, block_m), rank):
            choice = (select_segment(shape, name), select_wide_segment(shape, name), block_m)
        else:
            choice = (select_shrink(shape, block_m, name), select_expand(shape, block_m, name), block_m)
        beside = num_tokens in beside_tokens
        if (choice, beside) in seen:
            continue
        seen.add((choice, beside))
        segments = make_lora_segments(
            torch.full((num_tokens,), -1, dtype=torch.int32, device=device), num_slots, workspace
        )
        x = torch.zeros((num_tokens, in_features), dtype=dtype, device=device)
        out = torch.zeros((num_tokens, sum(out_features)), dtype=dtype, device=device)
        lora_linear(out, x, segments, tables, sites, out_features, num_slices)
        if beside:
            delta = torch.zeros(out.shape, dtype=torch.float32, device=device)
            lora_linear(delta, x, segments, tables, sites, out_features, num_slices, accumulate=False)
    return len(seen)
