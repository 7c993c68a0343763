"""Projection and delta of few rows in one launch, in the interpreter; run by test_lora_interpreted.py."""

from dataclasses import replace

import torch

from lorikeet_kernels.dense.few_rows_linear import few_rows_linear
from lorikeet_kernels.dense.fp8_few_rows import fp8_few_rows
from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.lora.few_rows_lora import few_rows_lora
from lorikeet_kernels.lora.fp8_few_rows_lora import fp8_few_rows_lora
from lorikeet_kernels.lora.joined_delta import JoinedSites
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, random_fp8_weight
from lorikeet_kernels.tiling import PairTiles
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

HIDDEN, WIDTHS, DTYPE = 80, (48, 16, 24), torch.float16
FEW, PAIR = FewRowsTiles(2, 4), PairTiles(16, 32, 32, 2)


def check() -> None:
    """Each kernel's bits, in both phases; a site absent for a slot, rows without one; a bias or none."""
    slot_sites = [[SlotSite(8), SlotSite(0), SlotSite(16)], [SlotSite(3), SlotSite(32), SlotSite(16)]]
    tables = make_tables([SiteShape(HIDDEN, w) for w in WIDTHS], slot_sites, dtype=DTYPE)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sum(WIDTHS), HIDDEN, generator=generator).to(DTYPE)
    bias = torch.randn(sum(WIDTHS), generator=generator).to(DTYPE)
    packed = random_fp8_weight(1, WIDTHS, HIDDEN, "block", generator).expert(0)
    workspace, apart = LoraWorkspace(torch.device("cpu")), LoraWorkspace(torch.device("cpu"))
    for slots in ([1], [0, -1, 1], [-1]):
        x = torch.randn(len(slots), HIDDEN, generator=generator).to(DTYPE)
        segments = replace(make_lora_segments(torch.tensor(slots, dtype=torch.int32), 2), workspace=workspace)
        for added in (None, bias):
            shape = (len(slots), sum(WIDTHS))
            expected, of_fp8 = torch.full((2, *shape), float("nan"), dtype=DTYPE)
            few_rows_linear(x, weight, added, expected, FEW)
            quantized = quantize_rows_reference(x, packed.activations)
            fp8_few_rows(quantized, packed, of_fp8, FEW, added)
            delta = torch.full(shape, float("nan"))
            lanes = site_lanes(WIDTHS, (1, 1, 1))
            pair_lora(
                delta, x, segments.token_slot, None, None, tables, (0, 1, 2), lanes, PAIR, apart,
                accumulate=False,
            )  # fmt: skip
            adapters = JoinedSites(segments, tables, (0, 1, 2), WIDTHS, (1, 1, 1), PAIR)
            out, got = torch.full_like(expected, float("nan")), torch.full_like(delta, float("nan"))
            few_rows_lora(x, weight, added, out, got, FEW, adapters)
            assert torch.equal(out, expected)
            assert torch.equal(got.view(torch.int32), delta.view(torch.int32))
            out.fill_(float("nan"))
            got.fill_(float("nan"))
            fp8_few_rows_lora(quantized, packed, added, x, out, got, FEW, adapters)
            assert torch.equal(out, of_fp8)
            assert torch.equal(got.view(torch.int32), delta.view(torch.int32))


if __name__ == "__main__":
    check()
