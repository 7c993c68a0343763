"""Pairs sorted by expert and cut into blocks of rows, for the expert GEMMs on a GPU.

    order: the pairs (t K + k) by expert, ascending within one
    blocks[b] = (first place in order, number of pairs <= block_rows, expert, 0), 0 pairs beyond the last

The order is the same in every run. One launch up to 512 pairs, else two; no host sync, no atomics.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

PART = 512
"""Pairs a program."""


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """See this module's docstring. Valid for one layer of one step."""

    order: torch.Tensor  # [T * K] int32
    blocks: torch.Tensor  # [capacity, 4] int32
    block_rows: int
    num_experts: int
    top_k: int

    @property
    def capacity(self) -> int:
        """A bound on the number of blocks, known on the host."""
        return self.blocks.shape[0]


def block_capacity(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that `num_pairs` pairs can need."""
    used = min(num_pairs, num_experts)
    return (num_pairs + used * (block_rows - 1)) // block_rows


def expert_blocks_reference(topk_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """See `expert_blocks`."""
    num_pairs = topk_ids.numel()
    flat = topk_ids.flatten().to(torch.int64)
    order = torch.argsort(flat, stable=True).to(torch.int32)
    bounds = [0, *flat.bincount(minlength=num_experts).cumsum(0).tolist()]
    blocks = torch.zeros((block_capacity(num_pairs, num_experts, block_rows), 4), dtype=torch.int32)
    cut = [
        (first, min(block_rows, end - first), expert, 0)
        for expert, (begin, end) in enumerate(pairwise(bounds))
        for first in range(begin, end, block_rows)
    ]
    if cut:
        blocks[: len(cut)] = torch.tensor(cut, dtype=torch.int32)
    return ExpertBlocks(order, blocks.to(topk_ids.device), block_rows, num_experts, topk_ids.shape[1])


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids_ptr, counts_ptr, num_pairs, EXPERTS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr
):
    """counts[part, expert]."""
    part = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for start in tl.static_range(0, PART, STEP):
        i = part * PART + start + tl.arange(0, STEP)
        ids = tl.load(ids_ptr + i, mask=i < num_pairs, other=-1)
        count += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + part * EXPERTS + expert, count)


@triton.jit(do_not_specialize=["num_pairs", "capacity", "num_parts"])
def _place_kernel(
    ids_ptr, counts_ptr, order_ptr, blocks_ptr, num_pairs, capacity, num_parts,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, EXPERT_STEP: tl.constexpr, BLOCK_STEP: tl.constexpr,
):  # fmt: skip
    """Each program places its part of the pairs and writes its share of the blocks."""
    part = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    i = part * PART + tl.arange(0, PART)
    ids = tl.load(ids_ptr + i, mask=i < num_pairs, other=EXPERTS)
    if PARTS == 1:
        count = tl.zeros([EXPERTS], tl.int32)
        for start in tl.static_range(0, PART, STEP):
            j = start + tl.arange(0, STEP)
            other = tl.load(ids_ptr + j, mask=j < num_pairs, other=-1)
            count += tl.sum((other[:, None] == expert[None, :]).to(tl.int32), axis=0)
        before = tl.zeros([EXPERTS], tl.int32)
    else:
        p = tl.arange(0, PARTS)
        counts = tl.load(
            counts_ptr + p[:, None] * EXPERTS + expert[None, :], mask=(p < num_parts)[:, None], other=0
        )
        count = tl.sum(counts, axis=0)
        before = tl.sum(tl.where((p < part)[:, None], counts, 0), axis=0)
    end = tl.cumsum(count, 0)
    begin = end - count
    # a pair's place: its expert's begin, that expert's pairs in earlier parts, and in this part before it
    rank = tl.zeros([PART], tl.int32)
    for start in tl.static_range(0, PART, STEP):
        j = part * PART + start + tl.arange(0, STEP)
        other = tl.load(ids_ptr + j, mask=j < num_pairs, other=-1)
        rank += tl.sum(((other[None, :] == ids[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), axis=1)
    base = begin + before
    place = rank
    for start in tl.static_range(0, EXPERTS, EXPERT_STEP):
        e = start + tl.arange(0, EXPERT_STEP)
        chosen = tl.sum(tl.where(e[:, None] == expert[None, :], base[None, :], 0), axis=1)
        place += tl.sum(tl.where(ids[:, None] == e[None, :], chosen[None, :], 0), axis=1)
    tl.store(order_ptr + place, i, mask=i < num_pairs)
    num_blocks = tl.cdiv(count, BLOCK_ROWS)
    block_end = tl.cumsum(num_blocks, 0)
    first_block = part * BLOCK_STEP
    while first_block < capacity:
        b = first_block + tl.arange(0, BLOCK_STEP)
        owner = tl.sum((block_end[None, :] <= b[:, None]).to(tl.int32), axis=1)
        mine = owner[:, None] == expert[None, :]
        skipped = tl.sum(tl.where(mine, (block_end - num_blocks)[None, :], 0), axis=1)
        first = tl.sum(tl.where(mine, begin[None, :], 0), axis=1) + (b - skipped) * BLOCK_ROWS
        left = tl.sum(tl.where(mine, end[None, :], 0), axis=1) - first
        used = owner < EXPERTS
        entry = blocks_ptr + 4 * b
        tl.store(entry, tl.where(used, first, 0), mask=b < capacity)
        tl.store(entry + 1, tl.where(used, tl.minimum(left, BLOCK_ROWS), 0), mask=b < capacity)
        tl.store(entry + 2, tl.where(used, owner, 0), mask=b < capacity)
        first_block += num_parts * BLOCK_STEP


def expert_blocks(topk_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """Sort and cut `topk_ids` [T, K] int32."""
    if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids is {topk_ids.dtype}, strides {topk_ids.stride()}: pass contiguous int32")
    if topk_ids.device.type == "cpu" or topk_ids.numel() == 0:
        return expert_blocks_reference(topk_ids, num_experts, block_rows)
    return cut_blocks(topk_ids, num_experts, block_rows)


def cut_blocks(topk_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """Launch, for at least one pair; `expert_blocks` on a GPU, and what the interpreter tests."""
    num_pairs = topk_ids.numel()
    capacity = block_capacity(num_pairs, num_experts, block_rows)
    padded = triton.next_power_of_2(num_experts)
    part = min(PART, max(16, triton.next_power_of_2(num_pairs)))
    num_parts = triton.cdiv(num_pairs, part)
    # each piece starts at a multiple of 16 bytes, whatever the batch: Triton would compile for both cases
    sizes = [4 * capacity, -(-num_pairs // 4) * 4, num_parts * max(4, padded) if num_parts > 1 else 4]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=topk_ids.device)
    blocks, order, counts = buffer.split(sizes)
    step = min(32, part)
    if num_parts > 1:
        _count_kernel[(num_parts,)](
            topk_ids, counts, num_pairs, EXPERTS=padded, PART=part, STEP=step, num_warps=4
        )
    _place_kernel[(num_parts,)](
        topk_ids, counts, order, blocks, num_pairs, capacity, num_parts,
        EXPERTS=padded, PARTS=triton.next_power_of_2(num_parts), BLOCK_ROWS=block_rows, PART=part, STEP=step,
        EXPERT_STEP=min(step, padded), BLOCK_STEP=32, num_warps=8 if part > 128 else 4,
    )  # fmt: skip
    return ExpertBlocks(order[:num_pairs], blocks.view(-1, 4), block_rows, num_experts, topk_ids.shape[1])
