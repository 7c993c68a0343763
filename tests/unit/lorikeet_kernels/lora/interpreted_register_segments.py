"""The Gluon kernel of register_segments in Triton's interpreter, run by test_lora_interpreted.py."""

import gluon_stand_in
import torch

gluon_stand_in.install()

from lorikeet_kernels.lora import part_sums  # noqa: E402 (what it imports stands in by now)
from lorikeet_kernels.lora import register_segments as kernel  # noqa: E402
from lorikeet_kernels.lora.group_blocks import group_pairs  # noqa: E402
from lorikeet_kernels.lora.lora_linear import lora_linear_reference  # noqa: E402
from lorikeet_kernels.lora.lora_segments import make_lora_segments  # noqa: E402
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace  # noqa: E402
from lorikeet_kernels.lora.output_lanes import site_lanes  # noqa: E402
from lorikeet_kernels.testing import (  # noqa: E402
    TOLERANCE,
    SiteShape,
    SlotSite,
    make_tables,
    relative_error,
)
from lorikeet_kernels.tiling import RegisterTiles  # noqa: E402

WORKSPACE = LoraWorkspace(torch.device("cpu"))


def check(
    num_tokens: int,
    in_features: int,
    widths: tuple[int, ...],
    slices: tuple[int, ...],
    slot_sites: list[list[SlotSite]],
) -> None:
    """Three batches of changing sizes in one workspace, in place and stored alone: phases of both kinds."""
    tables = make_tables([SiteShape(in_features, w) for w in widths], slot_sites, dtype=torch.float16)
    sites, count = tuple(range(len(widths))), len(slot_sites)
    for tokens in (num_tokens, num_tokens - 9, num_tokens):
        generator = torch.Generator().manual_seed(tokens)
        slots = torch.randint(-1, count, (tokens,), generator=generator, dtype=torch.int32)
        x = torch.randn(tokens, in_features, generator=generator).half()
        base = torch.randn(tokens, sum(widths), generator=generator).half()
        expected, out = base.clone(), base.clone()
        segments = make_lora_segments(slots, count)
        lora_linear_reference(expected, x, segments, tables, sites, widths, slices)
        blocks = group_pairs(None, slots, 1, count, 16, WORKSPACE)
        tiles, lanes = RegisterTiles(128, 64, 2), site_lanes(widths, slices)
        kernel.register_segments(out, x, blocks, tables, sites, lanes, tiles, WORKSPACE)
        assert relative_error(out, expected) < TOLERANCE[torch.float16]
        assert torch.equal(out[slots < 0], base[slots < 0])
        delta = torch.full(out.shape, float("nan"))
        kernel.register_segments(delta, x, blocks, tables, sites, lanes, tiles, WORKSPACE, accumulate=False)
        assert torch.equal((base.float() + delta).half(), out)
        assert not delta[slots < 0].any()
        assert delta[slots < 0].signbit().all()


if __name__ == "__main__":
    gluon_stand_in.attach(kernel)
    gluon_stand_in.attach(part_sums)
    three = [[SlotSite(8), SlotSite(0), SlotSite(16)], [SlotSite(3), SlotSite(16), SlotSite(16)]]
    check(13, 200, (48, 16, 24), (1, 1, 1), three)
    check(40, 61, (160,), (2,), [[SlotSite(5, num_a=2)], [SlotSite(16)]])
    check(
        60,
        300,
        (80, 48),
        (1, 1),
        [[SlotSite(24), SlotSite(32)], [SlotSite(16), SlotSite(0)], [SlotSite(0)] * 2],
    )
