"""Dense LoRA with products out of registers, on a GPU against float32 references."""

import pytest
import torch

from lorikeet_kernels.lora.group_blocks import group_pairs
from lorikeet_kernels.lora.lora_linear import lora_linear_reference
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.register_segments import register_segments
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling import RegisterTiles

GPU = torch.device("cuda")
NOTHING = SlotSite(0)


def _compare(
    in_features: int,
    widths: tuple[int, ...],
    slices: tuple[int, ...],
    slots: list[list[SlotSite]],
    num_tokens: int,
    tiles: RegisterTiles,
    dtype: torch.dtype,
) -> None:
    """Thirty launches back to back, a new batch each, in one workspace; then the last one again and again.

    Also as a delta stored alone, which another launch adds: the same bits.
    """
    tables = make_tables([SiteShape(in_features, w) for w in widths], slots, dtype=dtype)
    a, b, rank, num_a = tables.a_offset, tables.b_offset, tables.rank, tables.num_a
    on_gpu = LoraTables(
        tables.arena.to(GPU), a.to(GPU), b.to(GPU), rank.to(GPU), num_a.to(GPU), tables.max_rank
    )
    as_float = LoraTables(tables.arena.float(), a, b, rank, num_a, tables.max_rank)
    workspace, lanes, sites = LoraWorkspace(GPU), site_lanes(widths, slices), tuple(range(len(widths)))
    generator = torch.Generator().manual_seed(num_tokens)
    batches = []
    for number in range(30):
        count = max(1, num_tokens - number % 5)
        token_slot = torch.randint(-1, len(slots), (count,), generator=generator, dtype=torch.int32)
        x = torch.randn(count, in_features, generator=generator).to(dtype)
        out = torch.randn(count, sum(widths), generator=generator).to(dtype)
        blocks = group_pairs(None, token_slot.to(GPU), 1, len(slots), 16, workspace)
        batches.append((token_slot, x, out, x.to(GPU), out.to(GPU), blocks))
    torch.cuda.synchronize()
    for _, _, _, x, out, blocks in batches:
        register_segments(out, x, blocks, on_gpu, sites, lanes, tiles, workspace)
    torch.cuda.synchronize()
    for token_slot, x, before, _, got, _ in batches[::7]:
        expected = before.float()
        segments = make_lora_segments(token_slot, len(slots))
        lora_linear_reference(expected, x.float(), segments, as_float, sites, widths, slices)
        assert relative_error(got.cpu(), expected) < TOLERANCE[dtype]
        assert torch.equal(got.cpu()[token_slot < 0], before[token_slot < 0])
    _, _, before, x, got, blocks = batches[-1]
    for _ in range(10):
        again = before.to(GPU)
        register_segments(again, x, blocks, on_gpu, sites, lanes, tiles, workspace)
        assert torch.equal(again, got)
        delta = torch.full(before.shape, float("nan"), device=GPU)
        register_segments(delta, x, blocks, on_gpu, sites, lanes, tiles, workspace, accumulate=False)
        assert torch.equal((before.to(GPU).float() + delta).to(dtype), got)


@pytest.mark.parametrize("in_features", [40, 61, 1000, 2880])
@pytest.mark.parametrize("num_tokens", [20, 100])
@pytest.mark.parametrize("tiles", [RegisterTiles(256, 64, 2), RegisterTiles(512, 512, 8, 64)])
def test_fused_sites(in_features: int, num_tokens: int, tiles: RegisterTiles) -> None:
    """q, k and v with ranks of their own, some absent."""
    slots = [
        [SlotSite(8), NOTHING, SlotSite(3)],
        [SlotSite(16), SlotSite(16), SlotSite(16)],
        [NOTHING] * 3,
    ]
    _compare(in_features, (192, 64, 48), (1, 1, 1), slots, num_tokens, tiles, torch.bfloat16)


@pytest.mark.parametrize("tiles", [RegisterTiles(256, 64, 1), RegisterTiles(1024, 256, 4)])
def test_rank_32_and_two_slices(tiles: RegisterTiles) -> None:
    """Two halves of a site, one slot with two A and one with one; float16."""
    slots = [[SlotSite(24, num_a=2)], [SlotSite(32)]]
    _compare(512, (320,), (2,), slots, 40, tiles, torch.float16)


def test_a_real_shape() -> None:
    """The sizes of a large model's fused projection, eight slots."""
    slots = [[SlotSite(16)] * 3 for _ in range(8)]
    _compare(8192, (8192, 1024, 1024), (1, 1, 1), slots, 32, RegisterTiles(1024, 256, 8), torch.bfloat16)
