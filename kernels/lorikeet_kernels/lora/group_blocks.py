"""Sort pairs by (expert, slot) on the GPU and cut each group that has an adapter into blocks of rows.

Three dependent launches, no host sync: count (a pair's rank within its group comes from an atomic counter, so
pairs of one group come in any order: no result depends on it), scan, scatter.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.lora_workspace import LoraWorkspace

BLOCK = 256
SCAN_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """`blocks[b]` = (index in its group, pairs from here to the group's end, expert, slot).

    There are `num_blocks[0]` of them. `pairs[b]` are the block's pairs; places beyond the group's end, and
    entries beyond the last block, hold anything. Blocks of one group lie side by side, so a kernel may take
    several as one. `starts` holds where each group begins in order, group = expert * (S + 1) + slot + 1, and
    the number of pairs at its end. `capacity` bounds num_blocks on the host.
    """

    order: torch.Tensor  # [P] int32
    starts: torch.Tensor  # [E * (S + 1) + 1] int32
    blocks: torch.Tensor  # [capacity, 4] int32
    pairs: torch.Tensor  # [capacity, block_m] int32
    num_blocks: torch.Tensor  # [1] int32
    scratch: torch.Tensor  # int32: each pair's rank in its group, then each group's first block
    block_m: int
    capacity: int


@triton.jit
def _group_of(
    topk_ids_ptr, token_slot_ptr, i, inside, num_slots, TOP_K: tl.constexpr, HAS_EXPERTS: tl.constexpr
):
    slot = tl.load(token_slot_ptr + i // TOP_K, mask=inside, other=-1)
    expert = tl.zeros_like(slot)
    if HAS_EXPERTS:
        expert = tl.load(topk_ids_ptr + i, mask=inside, other=0)
    return expert * (num_slots + 1) + slot + 1, expert, slot


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _count_kernel(
    topk_ids_ptr, token_slot_ptr, counts_ptr, rank_ptr, num_pairs, num_slots,
    TOP_K: tl.constexpr, HAS_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_pairs
    group, _, _ = _group_of(topk_ids_ptr, token_slot_ptr, i, inside, num_slots, TOP_K, HAS_EXPERTS)
    rank = tl.atomic_add(counts_ptr + group, 1, mask=inside, sem="relaxed")
    tl.store(rank_ptr + i, rank, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_groups", "num_slots"])
def _scan_kernel(
    counts_ptr, starts_ptr, block_starts_ptr, num_blocks_ptr, num_pairs, num_groups, num_slots,
    BLOCK_M: tl.constexpr, SCAN_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pairs_before = 0
    blocks_before = 0
    first = 0
    while first < num_groups:
        group = first + tl.arange(0, SCAN_BLOCK)
        inside = group < num_groups
        count = tl.load(counts_ptr + group, mask=inside, other=0)
        tl.store(counts_ptr + group, tl.zeros_like(count), mask=inside)  # ready for the next layer's count
        num_blocks = tl.where(group % (num_slots + 1) == 0, 0, tl.cdiv(count, BLOCK_M))
        tl.store(starts_ptr + group, pairs_before + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(block_starts_ptr + group, blocks_before + tl.cumsum(num_blocks, 0) - num_blocks, mask=inside)
        pairs_before += tl.sum(count)
        blocks_before += tl.sum(num_blocks)
        first += SCAN_BLOCK
    tl.store(starts_ptr + num_groups, num_pairs)
    tl.store(num_blocks_ptr, blocks_before)


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _scatter_kernel(
    topk_ids_ptr, token_slot_ptr, rank_ptr, starts_ptr, block_starts_ptr, order_ptr, blocks_ptr, pairs_ptr,
    num_pairs, num_slots, TOP_K: tl.constexpr, HAS_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_pairs
    group, expert, slot = _group_of(topk_ids_ptr, token_slot_ptr, i, inside, num_slots, TOP_K, HAS_EXPERTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    rank = tl.load(rank_ptr + i, mask=inside, other=0)
    start = tl.load(starts_ptr + group, mask=inside, other=0)
    end = tl.load(starts_ptr + group + 1, mask=inside, other=0)
    tl.store(order_ptr + start + rank, i, mask=inside)
    adapted = inside & (slot >= 0)
    index = rank // BLOCK_M
    block = tl.load(block_starts_ptr + group, mask=adapted, other=0) + index
    tl.store(pairs_ptr + block * BLOCK_M + rank % BLOCK_M, i, mask=adapted)
    leads = adapted & (rank % BLOCK_M == 0)
    entry = blocks_ptr + 4 * block
    tl.store(entry, index, mask=leads)
    tl.store(entry + 1, end - start - rank, mask=leads)
    tl.store(entry + 2, expert, mask=leads)
    tl.store(entry + 3, slot, mask=leads)


def block_capacity(num_pairs: int, num_experts: int, num_slots: int, block_m: int) -> int:
    """The most blocks that `num_pairs` pairs can need."""
    return min(num_pairs, -(-num_pairs // block_m) + num_experts * num_slots)


def _allocate(
    num_pairs: int, num_groups: int, capacity: int, block_m: int, device: torch.device
) -> GroupBlocks:
    # each part starts at a multiple of 16 bytes, whatever the batch: else Triton would compile for both cases
    room = max(1, capacity)
    needed = (
        num_pairs,
        num_groups + 1,
        4 * room,
        block_m * room,
        1,
        -(-num_pairs // 4) * 4 + num_groups,
    )
    padded = [-(-words // 4) * 4 for words in needed]
    parts = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    order, starts, blocks, pairs, num_blocks, scratch = (
        part[:words] for part, words in zip(parts, needed, strict=True)
    )
    return GroupBlocks(
        order, starts, blocks.view(-1, 4), pairs.view(-1, block_m), num_blocks, scratch, block_m, capacity
    )


def group_pairs(
    topk_ids: torch.Tensor | None,
    token_slot: torch.Tensor,
    num_experts: int,
    num_slots: int,
    block_m: int,
    workspace: LoraWorkspace,
    reuse: GroupBlocks | None = None,
) -> GroupBlocks:
    """Group the pairs of `topk_ids` [T, K] int32, or the tokens themselves where it is None (one expert).

    `reuse` are the blocks of an earlier batch of the same sizes, to be overwritten: so a captured graph and
    the graphs after it share one place.
    """
    top_k = 1 if topk_ids is None else topk_ids.shape[1]
    num_pairs = token_slot.shape[0] * top_k
    num_groups = num_experts * (num_slots + 1)
    device = token_slot.device
    capacity = block_capacity(num_pairs, num_experts, num_slots, block_m)
    to = reuse or _allocate(num_pairs, num_groups, capacity, block_m, device)
    if (to.order.shape[0], to.starts.shape[0], to.block_m) != (num_pairs, num_groups + 1, block_m):
        raise ValueError(
            f"reuse holds {to.order.shape[0]} pairs, not {num_pairs}: pass blocks of the same sizes"
        )
    counts = workspace.zeroed(("group_counts", num_groups), num_groups)
    rank, block_starts = to.scratch[:num_pairs], to.scratch[-(-num_pairs // 4) * 4 :]
    ids = token_slot if topk_ids is None else topk_ids
    grid = (triton.cdiv(num_pairs, BLOCK),)
    pdl = device.type == "cuda"
    dependent = {"launch_pdl": True} if pdl else {}
    _count_kernel[grid](
        ids, token_slot, counts, rank, num_pairs, num_slots,
        TOP_K=top_k, HAS_EXPERTS=topk_ids is not None, BLOCK=BLOCK, PDL=pdl,
    )  # fmt: skip
    _scan_kernel[(1,)](
        counts, to.starts, block_starts, to.num_blocks, num_pairs, num_groups, num_slots,
        BLOCK_M=block_m, SCAN_BLOCK=SCAN_BLOCK, PDL=pdl, num_warps=16, **dependent,
    )  # fmt: skip
    _scatter_kernel[grid](
        ids, token_slot, rank, to.starts, block_starts, to.order, to.blocks, to.pairs, num_pairs,
        num_slots,
        TOP_K=top_k, HAS_EXPERTS=topk_ids is not None, BLOCK_M=block_m, BLOCK=BLOCK, PDL=pdl, **dependent,
    )  # fmt: skip
    return to
