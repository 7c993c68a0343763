"""Projection and delta of few rows in one launch, in the interpreter; run by test_lora_interpreted.py."""

from dataclasses import replace

import torch

from lorikeet_kernels.dense.few_rows_linear import few_rows_linear
from lorikeet_kernels.lora.few_rows_lora import few_rows_lora
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables
from lorikeet_kernels.tiling import PairTiles
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

HIDDEN, WIDTHS, DTYPE = 72, (48, 16, 24), torch.float16
FEW, PAIR = FewRowsTiles(2, 4), PairTiles(16, 32, 32, 2)


def check() -> None:
    """Both kernels' bits, in both phases; a site absent for a slot, rows without one; a bias or none."""
    slot_sites = [[SlotSite(8), SlotSite(0), SlotSite(16)], [SlotSite(3), SlotSite(32), SlotSite(16)]]
    tables = make_tables([SiteShape(HIDDEN, w) for w in WIDTHS], slot_sites, dtype=DTYPE)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sum(WIDTHS), HIDDEN, generator=generator).to(DTYPE)
    bias = torch.randn(sum(WIDTHS), generator=generator).to(DTYPE)
    workspace, apart = LoraWorkspace(torch.device("cpu")), LoraWorkspace(torch.device("cpu"))
    for slots in ([1], [0, -1, 1], [-1]):
        x = torch.randn(len(slots), HIDDEN, generator=generator).to(DTYPE)
        segments = replace(make_lora_segments(torch.tensor(slots, dtype=torch.int32), 2), workspace=workspace)
        for added in (None, bias):
            expected = torch.full((len(slots), sum(WIDTHS)), float("nan"), dtype=DTYPE)
            few_rows_linear(x, weight, added, expected, FEW)
            delta = torch.full(expected.shape, float("nan"))
            lanes = site_lanes(WIDTHS, (1, 1, 1))
            pair_lora(
                delta, x, segments.token_slot, None, None, tables, (0, 1, 2), lanes, PAIR, apart,
                accumulate=False,
            )  # fmt: skip
            out, got = torch.full_like(expected, float("nan")), torch.full_like(delta, float("nan"))
            few_rows_lora(
                x, weight, added, out, got, FEW, segments, tables, (0, 1, 2), WIDTHS, (1, 1, 1), PAIR
            )
            assert torch.equal(out, expected)
            assert torch.equal(got.view(torch.int32), delta.view(torch.int32))


if __name__ == "__main__":
    check()
