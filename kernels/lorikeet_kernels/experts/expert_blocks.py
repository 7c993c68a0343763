"""Pairs sorted by expert and cut into blocks of rows, for the expert GEMMs on a GPU.

    order: the pairs (t K + k) by expert, ascending within one
    blocks[b] = (first place in order, number of pairs <= block_rows, expert, 0), 0 pairs beyond the last

The order is the same in every run. One launch up to 256 pairs, else two; no host sync, no atomics. The pairs
of one token have experts of their own: for them there is nothing to sort, and `lone_blocks` launches nothing.
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

SINGLE_PART = 256
"""Up to so many pairs one program does all."""
PART = 128
"""Pairs of each of several programs, which all read everyone's counts: twice as many beyond MANY_PAIRS."""
MANY_PAIRS = 16384
STEP = 32


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """See this module's docstring. Valid for one layer of one step.

    Where `is_lone`, block p is pair p: `order` names the pairs' experts instead, and `blocks` is empty.
    """

    order: torch.Tensor  # [T * K] int32
    blocks: torch.Tensor  # [capacity, 4] int32
    block_rows: int
    num_experts: int
    top_k: int
    is_lone: bool = False

    @property
    def capacity(self) -> int:
        """A bound on the number of blocks, known on the host."""
        return self.order.shape[0] if self.is_lone else self.blocks.shape[0]


def block_capacity(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that `num_pairs` pairs can need."""
    used = min(num_pairs, num_experts)
    return (num_pairs + used * (block_rows - 1)) // block_rows


def cut_kind(num_pairs: int) -> int:
    """Equal for numbers of pairs that launch the same kernels: a program's pairs, below zero for several."""
    if num_pairs <= SINGLE_PART:
        return max(16, 1 << (num_pairs - 1).bit_length())
    return -PART if num_pairs <= MANY_PAIRS else -2 * PART


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


@triton.jit
def _count(ids_ptr, begin, num_pairs, EXPERTS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr):
    """How many of the pairs [begin, begin + PART) each expert has."""
    expert = tl.arange(0, EXPERTS)
    seen = tl.zeros([STEP, EXPERTS], tl.int32)
    for start in tl.static_range(0, PART, STEP):
        i = begin + start + tl.arange(0, STEP)
        ids = tl.load(ids_ptr + i, mask=i < num_pairs, other=-1)
        seen += (ids[:, None] == expert[None, :]).to(tl.int32)
    return tl.sum(seen, axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_experts_kernel(
    ids_ptr, counts_ptr, num_pairs,
    EXPERTS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[part, expert]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    count = _count(ids_ptr, part * PART, num_pairs, EXPERTS, PART, STEP)
    tl.store(counts_ptr + part * EXPERTS + tl.arange(0, EXPERTS), count)


@triton.jit(do_not_specialize=["num_pairs", "capacity", "num_parts"])
def _place_kernel(
    ids_ptr, counts_ptr, order_ptr, blocks_ptr, num_pairs, capacity, num_parts,
    EXPERTS: tl.constexpr, SINGLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, BLOCK_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program places its part of the pairs and writes its share of the blocks.

    Where others have counted, what needs nothing of this launch begins beside those: the launch before them
    had completed when they let this one begin.
    """
    if PDL:
        if not SINGLE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if SINGLE:
            tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    i = part * PART + tl.arange(0, PART)
    ids = tl.load(ids_ptr + i, mask=i < num_pairs, other=0)
    if SINGLE:
        count = _count(ids_ptr, 0, num_pairs, EXPERTS, PART, STEP)
        before = tl.zeros([EXPERTS], tl.int32)
    else:
        everywhere = tl.zeros([STEP, EXPERTS], tl.int32)
        earlier = tl.zeros([STEP, EXPERTS], tl.int32)
        first_part = 0
        while first_part < num_parts:
            p = first_part + tl.arange(0, STEP)
            at = counts_ptr + p[:, None] * EXPERTS + expert[None, :]
            counts = tl.load(at, mask=(p < num_parts)[:, None], other=0)
            everywhere += counts
            earlier += tl.where((p < part)[:, None], counts, 0)
            first_part += STEP
        count = tl.sum(everywhere, axis=0)
        before = tl.sum(earlier, axis=0)
    end = tl.cumsum(count, 0)
    begin = end - count
    # a pair's place: its expert's begin, that expert's pairs in earlier parts, and in this part before it
    same = tl.zeros([PART, STEP], tl.int32)
    for start in tl.static_range(0, PART, STEP):
        j = part * PART + start + tl.arange(0, STEP)
        other = tl.load(ids_ptr + j, mask=j < num_pairs, other=-1)
        same += ((other[None, :] == ids[:, None]) & (j[None, :] < i[:, None])).to(tl.int32)
    place = tl.gather(begin + before, ids, 0) + tl.sum(same, axis=1)
    tl.store(order_ptr + place, i, mask=i < num_pairs)
    num_blocks = tl.cdiv(count, BLOCK_ROWS)
    block_end = tl.cumsum(num_blocks, 0)
    first_block = part * BLOCK_STEP
    while first_block < capacity:
        b = first_block + tl.arange(0, BLOCK_STEP)
        owner = tl.sum((block_end[None, :] <= b[:, None]).to(tl.int32), axis=1)
        used = owner < EXPERTS
        owner = tl.where(used, owner, 0)
        first = tl.gather(begin, owner, 0) + (b - tl.gather(block_end - num_blocks, owner, 0)) * BLOCK_ROWS
        left = tl.gather(end, owner, 0) - first
        entry = blocks_ptr + 4 * b
        tl.store(entry, tl.where(used, first, 0), mask=b < capacity)
        tl.store(entry + 1, tl.where(used, tl.minimum(left, BLOCK_ROWS), 0), mask=b < capacity)
        tl.store(entry + 2, owner, mask=b < capacity)
        first_block += num_parts * BLOCK_STEP


def expert_blocks(topk_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """Sort and cut `topk_ids` [T, K] int32."""
    if topk_ids.dtype != torch.int32 or not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids is {topk_ids.dtype}, strides {topk_ids.stride()}: pass contiguous int32")
    if topk_ids.device.type == "cpu" or topk_ids.numel() == 0:
        return expert_blocks_reference(topk_ids, num_experts, block_rows)
    return cut_blocks(topk_ids, num_experts, block_rows)


def lone_blocks(topk_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """Each pair of `topk_ids` [T, K] int32 a block of its own, without a launch, for `expert_gemm` alone."""
    ids = topk_ids.flatten()
    return ExpertBlocks(ids, ids.new_empty((0, 4)), block_rows, num_experts, topk_ids.shape[1], is_lone=True)


def cut_blocks(topk_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """Launch, for at least one pair; `expert_blocks` on a GPU, and what the interpreter tests."""
    num_pairs = topk_ids.numel()
    capacity = block_capacity(num_pairs, num_experts, block_rows)
    padded = max(4, triton.next_power_of_2(num_experts))
    part = abs(cut_kind(num_pairs))
    is_single = num_pairs <= SINGLE_PART
    num_parts = triton.cdiv(num_pairs, part)
    # each piece starts at a multiple of 16 bytes, whatever the batch: Triton would compile for both cases
    sizes = [4 * capacity, -(-num_pairs // 4) * 4, num_parts * padded]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=topk_ids.device)
    blocks, order, counts = buffer.split(sizes)
    on_gpu = topk_ids.device.type == "cuda"
    options: dict[str, int | bool] = {"num_warps": 8 if part > 64 else 4}
    if on_gpu:
        options["launch_pdl"] = True
    if not is_single:
        _count_experts_kernel[(num_parts,)](
            topk_ids, counts, num_pairs, EXPERTS=padded, PART=part, STEP=STEP, PDL=on_gpu, **options
        )
    _place_kernel[(num_parts,)](
        topk_ids, counts, order, blocks, num_pairs, capacity, num_parts,
        EXPERTS=padded, SINGLE=is_single, BLOCK_ROWS=block_rows, PART=part, STEP=min(STEP, part),
        BLOCK_STEP=32, PDL=on_gpu, **options,
    )  # fmt: skip
    return ExpertBlocks(order[:num_pairs], blocks.view(-1, 4), block_rows, num_experts, topk_ids.shape[1])
