"""Which warps of a projection add up a delta as those of its own launch do, and what such launches refuse."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.lora.few_rows_lora import few_rows_lora
from lorikeet_kernels.lora.fp8_few_rows_lora import fp8_few_rows_lora
from lorikeet_kernels.lora.joined_delta import JoinedSites, add_alike, delta_arguments
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.pair_lora import MAX_PAIRS
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, random_fp8_weight
from lorikeet_kernels.tiling import PairTiles
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

IN, OUT, BF16 = 64, 48, torch.bfloat16
FEW = FewRowsTiles(2, 4)


@pytest.mark.parametrize(
    ("tiles", "max_rank", "most_warps"),
    [
        (PairTiles(16, 256, 512, 4), 16, 16),
        (PairTiles(16, 512, 512, 4), 16, 16),  # a row of 512 is two loads of one warp, not one of two
        (PairTiles(32, 256, 256, 4), 32, 32),
        (PairTiles(16, 256, 128, 4), 16, 8),  # 128 rows of B keep 8 warps busy with whole loads
        (PairTiles(32, 256, 256, 4), 8, 8),  # ranks of 8 leave 8 rows of A
        (PairTiles(32, 256, 256, 4), 2, 0),  # two rows of A: its own four warps share them already
    ],
)
def test_warps_that_add_alike(tiles: PairTiles, max_rank: int, most_warps: int) -> None:
    """Each with whole rows of both tiles, eight numbers a lane."""
    assert [n for n in (1, 2, 4, 8, 16, 32) if add_alike(tiles, max_rank, n)] == [
        n for n in (1, 2, 4, 8, 16, 32) if n <= most_warps
    ]


def adapters_of(num_rows: int, *sites: int) -> JoinedSites:
    """Rows of slot 0 at one site each; the tables have one."""
    tables = make_tables([SiteShape(IN, OUT)], [[SlotSite(16)]], dtype=BF16)
    segments = make_lora_segments(torch.zeros(num_rows, dtype=torch.int32), 1)
    count = len(sites)
    return JoinedSites(
        segments, tables, sites, (OUT // count,) * count, (1,) * count, PairTiles(16, 32, 32, 2)
    )


def test_what_a_delta_is_not_made_of() -> None:
    """Rows beyond the scratch memory, between 16 bytes, of another batch; sites that are none or too many."""
    x, delta = torch.zeros(2, IN, dtype=BF16), torch.zeros(2, OUT)
    odd = torch.zeros(2 * IN + 1, dtype=BF16)[1:].view(2, IN)
    adapters = adapters_of(2, 0)
    assert delta_arguments(x, delta, adapters, 4)[0] > 0
    for rows, into in ((odd, delta), (x, torch.zeros(2 * OUT + 1)[1:].view(2, OUT))):
        with pytest.raises(ValueError, match="16 bytes aligned"):
            delta_arguments(rows, into, adapters, 4)
    with pytest.raises(ValueError, match="another batch"):
        delta_arguments(x, delta, adapters_of(3, 0), 4)
    with pytest.raises(ValueError, match="columns"):
        delta_arguments(x, delta, replace(adapters, sites=(0, 0)), 4)
    for sites in ((0, 0, 0, 0), (1,), (-1,)):
        with pytest.raises(ValueError, match="of the tables' 1"):
            delta_arguments(x, delta, adapters_of(2, *sites), 4)
    most = MAX_PAIRS + 1
    with pytest.raises(ValueError, match=f"{most} pairs"):
        delta_arguments(torch.zeros(most, IN, dtype=BF16), torch.zeros(most, OUT), adapters_of(most, 0), 4)


def test_what_a_joined_projection_refuses() -> None:
    """Inputs, biases, outputs and deltas of other sizes than the weight's, in 16 bits and in FP8."""
    x, weight, adapters = torch.zeros(2, IN).to(BF16), torch.zeros(OUT, IN).to(BF16), adapters_of(2, 0)
    out, delta, short = torch.zeros(2, OUT).to(BF16), torch.zeros(2, OUT), torch.zeros(OUT - 8).to(BF16)
    with pytest.raises(ValueError, match="few rows: x"):
        few_rows_lora(x, torch.zeros(OUT, 2 * IN).to(BF16), None, out, delta, FEW, adapters)
    with pytest.raises(ValueError, match="outputs"):
        few_rows_lora(x, weight, short, out, delta, FEW, adapters)
    with pytest.raises(ValueError, match="few_rows_lora: delta"):
        few_rows_lora(x, weight, None, out, delta[:, :40], FEW, adapters)
    packed = random_fp8_weight(1, (OUT,), IN, "channel", torch.Generator().manual_seed(0)).expert(0)
    rows = quantize_rows_reference(x, packed.activations)
    with pytest.raises(ValueError, match="fp8_few_rows_lora: x"):
        fp8_few_rows_lora(rows, packed, None, x[:, :32], out, delta, FEW, adapters)
    with pytest.raises(ValueError, match="fp8_few_rows_lora: x"):
        fp8_few_rows_lora(rows, packed, None, x, out, delta[:, :40], FEW, adapters)
    with pytest.raises(ValueError, match="outputs"):
        fp8_few_rows_lora(rows, packed, short, x, out, delta, FEW, adapters)
    with pytest.raises(ValueError, match="scales"):
        fp8_few_rows_lora(replace(rows, scales=rows.scales[:1]), packed, None, x, out, delta, FEW, adapters)


def test_tables_of_no_rank() -> None:
    """Kernels are compiled for the largest one."""
    with pytest.raises(ValueError, match="max_rank is 0"):
        replace(adapters_of(1, 0).tables, max_rank=0)
