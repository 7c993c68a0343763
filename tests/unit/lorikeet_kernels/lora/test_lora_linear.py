"""lora_linear and lora_embedding references against a plain float64 loop."""

import pytest
import torch

from lorikeet_kernels.lora.lora_embedding import lora_embedding
from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, exact_delta, make_tables, relative_error
from lorikeet_kernels.tiling import PairTiles

IN, WIDTHS = 40, (48, 16, 16)
SLOTS = [
    [SlotSite(8), SlotSite(0), SlotSite(3)],
    [SlotSite(33), SlotSite(16), SlotSite(16)],
    [SlotSite(0), SlotSite(0), SlotSite(0)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7, 13, 300])
def test_fused_sites_match_float64_loop(dtype: torch.dtype, num_tokens: int) -> None:
    """q, k and v with ranks of their own, some absent, land in their own columns."""
    tables = make_tables([SiteShape(IN, w) for w in WIDTHS], SLOTS, dtype=dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, IN, generator=generator).to(dtype)
    out = torch.randn(num_tokens, sum(WIDTHS), generator=generator).to(dtype)
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    before = out.clone()
    lora_linear(out, x, make_lora_segments(slots, 3), tables, (0, 1, 2), WIDTHS)
    expected = before.to(torch.float64)
    for t in range(num_tokens):
        parts = [
            exact_delta(x[t], tables, int(slots[t]), site, 0, width, "concatenated")
            for site, width in enumerate(WIDTHS)
        ]
        expected[t] += torch.cat(parts)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert torch.equal(out[(slots < 0) | (slots == 2)], before[(slots < 0) | (slots == 2)])
    assert torch.equal(out[slots == 0, 48:64], before[slots == 0, 48:64])


def test_two_slices_with_their_own_a() -> None:
    """A fused gate_up of a dense MLP with two A matrices uses the first for gate and the second for up."""
    tables = make_tables([SiteShape(IN, 64)], [[SlotSite(5, num_a=2)]], dtype=torch.float32)
    x, out = torch.randn(4, IN), torch.zeros(4, 64)
    slots = torch.tensor([0, -1, 0, 0], dtype=torch.int32)
    lora_linear(out, x, make_lora_segments(slots, 1), tables, (0,), (64,), (2,))
    expected = torch.stack(
        [exact_delta(x[t], tables, int(slots[t]), 0, 0, 64, "concatenated") for t in range(4)]
    )
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_columns_must_add_up() -> None:
    """An out that does not hold all sites' columns is refused by name."""
    tables = make_tables([SiteShape(IN, 64)], [[SlotSite(5)]], dtype=torch.float32)
    segments = make_lora_segments(torch.zeros(4, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="sum of out_features"):
        lora_linear(torch.zeros(4, 63), torch.zeros(4, IN), segments, tables, (0,), (64,))


@pytest.mark.parametrize("sites", [(), (0, 0, 0, 0), (-1,), (0, 1)])
def test_sites_that_one_launch_does_not_take(sites: tuple[int, ...]) -> None:
    """None, too many, and what the tables do not have; an embedding's likewise."""
    tables = make_tables([SiteShape(IN, 64)], [[SlotSite(5)]], dtype=torch.float32)
    segments = make_lora_segments(torch.zeros(4, dtype=torch.int32), 1)
    widths = (16,) * len(sites)
    out = torch.zeros(4, sum(widths))
    with pytest.raises(ValueError, match="fuses 1 to 3 of the tables' 1"):
        lora_linear(out, torch.zeros(4, IN), segments, tables, sites, widths)
    lanes, ids = site_lanes(widths, (1,) * len(sites)), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="fuses 1 to 3 of the tables' 1"):
        pair_lora(
            out, torch.zeros(4, IN), ids, None, None, tables, sites, lanes, PairTiles(16, 32, 32, 2),
            segments.workspace,
        )  # fmt: skip
    if sites == (-1,):
        with pytest.raises(ValueError, match="of the tables' 1"):
            lora_embedding(torch.zeros(4, 64), ids, segments, tables, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_rows(dtype: torch.dtype) -> None:
    """Each token's row of A meets B; base rows keep their bits."""
    tables = make_tables([SiteShape(50, 24)], [[SlotSite(7)], [SlotSite(0)]], dtype=dtype)
    rank = 8  # the payload's [vocabulary, R] is read from the same elements as a linear A of that size
    ids = torch.tensor([3, 49, 0, 3, 7], dtype=torch.int32)
    slots = torch.tensor([0, 0, -1, 1, 0], dtype=torch.int32)
    out = torch.randn(5, 24).to(dtype)
    before = out.clone()
    lora_embedding(out, ids, make_lora_segments(slots, 2), tables, 0)
    a_start, b_start = int(tables.a_offset[0, 0]), int(tables.b_offset[0, 0])
    a = tables.arena[a_start : a_start + 50 * rank].view(50, rank).to(torch.float64)
    b = tables.arena[b_start : b_start + 24 * rank].view(24, rank).to(torch.float64)
    expected = before.to(torch.float64)
    for t in (0, 1, 4):
        expected[t] += b @ a[ids[t]]
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert torch.equal(out[2:4], before[2:4])
