"""Random adapters, quantised weights and routes, and float64 answers: for tests, benches and small cases."""

import math
from dataclasses import dataclass

import torch

from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling, quantize_channels, row_blocks
from lorikeet_kernels.dense.quantize_rows import GROUP, LARGEST, ActivationScaling
from lorikeet_kernels.dense.row_order import RowOrder, slice_columns
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import site_a, site_b, site_num_a, site_rank

ALIGNMENT_BYTES = 256
RANK_MULTIPLE = 8

# Relative Frobenius error allowed against float64, by compute dtype: one rounding of the result and its
# inputs.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 3e-3}


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A site as the kernels see it; `num_experts` 0 is a linear site."""

    in_features: int
    out_features: int
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class SlotSite:
    """What one slot has at one site: the adapter's own rank (0: nothing) and 1 or 2 A matrices."""

    rank: int
    num_a: int = 1


def make_tables(
    sites: list[SiteShape],
    slots: list[list[SlotSite]],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LoraTables:
    """Fill an arena with random adapters: `slots[s][j]` says what slot s has at `sites[j]`.

    Ranks are padded with zeros to a multiple of 8, as the payload is. A is scaled by 1/sqrt(in), B by
    1/sqrt(rank).
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    step = ALIGNMENT_BYTES // dtype.itemsize
    offsets_a, offsets_b, ranks, num_a = ([[0] * len(sites) for _ in slots] for _ in range(4))
    end = step  # offset 0 stays unused, so that a wrong zero offset reads no weights
    places: list[tuple[int, tuple[int, int, int], int, float]] = []
    for s, row in enumerate(slots):
        for j, (site, have) in enumerate(zip(sites, row, strict=True)):
            padded = -(-have.rank // RANK_MULTIPLE) * RANK_MULTIPLE
            ranks[s][j], num_a[s][j] = padded, have.num_a
            if padded == 0:
                continue
            experts = max(1, site.num_experts)
            offsets_a[s][j] = end
            places.append(
                (end, (experts * have.num_a, padded, site.in_features), have.rank, site.in_features**-0.5)
            )
            end = _aligned(end + experts * have.num_a * padded * site.in_features, step)
            offsets_b[s][j] = end
            places.append((end, (experts, site.out_features, padded), have.rank, have.rank**-0.5))
            end = _aligned(end + experts * site.out_features * padded, step)
    arena = torch.full((end,), float("nan"), dtype=dtype, device=device)  # gaps are poison
    for index, (start, shape, rank, std) in enumerate(places):
        values = torch.randn(shape, generator=generator, device=device).mul_(std)
        if index % 2 == 0:
            values[:, rank:, :] = 0.0
        else:
            values[:, :, rank:] = 0.0
        arena[start : start + math.prod(shape)] = values.to(dtype).reshape(-1)
    return LoraTables(
        arena=arena,
        a_offset=torch.tensor(offsets_a, dtype=torch.int64, device=device),
        b_offset=torch.tensor(offsets_b, dtype=torch.int64, device=device),
        rank=torch.tensor(ranks, dtype=torch.int32, device=device),
        num_a=torch.tensor(num_a, dtype=torch.int32, device=device),
        max_rank=max(RANK_MULTIPLE, *(r for row in ranks for r in row)),
    )


def exact_delta(
    x: torch.Tensor, tables: LoraTables, slot: int, site: int, expert: int, width: int, row_order: RowOrder
) -> torch.Tensor:
    """B A x of one row in float64, zeros where the slot has nothing at the site."""
    delta = torch.zeros(width, dtype=torch.float64, device=x.device)
    if slot < 0 or site_rank(tables, slot, site) == 0:
        return delta
    a = site_a(tables, slot, site, x.shape[0], expert + 1)[expert].to(torch.float64)
    b = site_b(tables, slot, site, width, expert + 1)[expert].to(torch.float64)
    num_a = site_num_a(tables, slot, site)
    for index in range(num_a):
        columns = slice(0, width) if num_a == 1 else slice_columns(row_order, width, index)
        delta[columns] = b[columns] @ (a[index] @ x.to(torch.float64))
    return delta


def random_fp8_weight(
    experts: int,
    heights: tuple[int, ...],
    columns: int,
    kind: WeightScaling,
    generator: torch.Generator,
    *,
    is_interleaved: bool = False,
) -> Fp8Weight:
    """Matrices one below the other, or row by row in turn, for each expert; about as large as a normal's."""
    values, scales = quantize_channels(torch.randn(experts, sum(heights), columns, generator=generator))
    if kind == "channel":
        return Fp8Weight(values, scales, ActivationScaling("token"))
    count = sum(-(-height // GROUP) for height in heights)
    scales = torch.rand(experts, count, -(-columns // GROUP), generator=generator) + 0.5
    blocks = row_blocks(heights, is_interleaved=is_interleaved)
    return Fp8Weight(values, scales / LARGEST, ActivationScaling("group"), blocks)


def random_mxfp4_weight(experts: int, rows: int, columns: int, generator: torch.Generator) -> Mxfp4Weight:
    """Every code, scales around 2**-8; columns rounded up to a multiple of 32."""
    shape = (experts, rows, -(-columns // 32))
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight(blocks, torch.randint(115, 124, shape, dtype=torch.uint8, generator=generator))


def random_experts(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for each token, int32 [tokens, top_k]."""
    scores = torch.rand(tokens, experts, generator=generator)
    return scores.topk(top_k, dim=1).indices.to(torch.int32).contiguous()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    difference = (actual.to(torch.float64) - expected.to(torch.float64)).norm()
    return float(difference / expected.to(torch.float64).norm().clamp(min=1e-30))


def _aligned(offset: int, step: int) -> int:
    return -(-offset // step) * step
