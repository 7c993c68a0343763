"""Dense LoRA, embedding rows and routing on a GPU against the references."""

import pytest
import torch

from lorikeet_kernels.experts.routing import (
    route_sigmoid,
    route_sigmoid_grouped,
    route_sigmoid_grouped_reference,
    route_sigmoid_reference,
    route_softmax,
    route_softmax_grouped,
    route_softmax_grouped_reference,
    route_softmax_reference,
)
from lorikeet_kernels.lora.lora_embedding import lora_embedding
from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error

GPU = torch.device("cuda")
WIDTHS = (192, 64, 48)
SLOTS = [
    [SlotSite(8), SlotSite(0), SlotSite(3)],
    [SlotSite(33), SlotSite(16), SlotSite(16)],
    [SlotSite(0), SlotSite(0), SlotSite(0)],
]


def _both(sites: list[SiteShape], slots: list[list[SlotSite]]) -> tuple[LoraTables, LoraTables]:
    tables = make_tables(sites, slots, dtype=torch.bfloat16)
    rest = (tables.a_offset, tables.b_offset, tables.rank, tables.num_a)
    as_float = LoraTables(tables.arena.float(), *rest, tables.max_rank)
    return as_float, LoraTables(tables.arena.to(GPU), *(t.to(GPU) for t in rest), tables.max_rank)


@pytest.mark.parametrize("in_features", [40, 61, 1000])
@pytest.mark.parametrize("num_tokens", [1, 7, 13, 40, 300, 1500])
@pytest.mark.parametrize("max_rank", [16, 32, 33])
def test_fused_sites(in_features: int, num_tokens: int, max_rank: int) -> None:
    """q, k and v with ranks of their own, some absent, on all paths: by token, by segment, grouped."""
    slots_of_ranks = [[SlotSite(min(s.rank, max_rank)) for s in row] for row in SLOTS]
    as_float, on_gpu = _both([SiteShape(in_features, w) for w in WIDTHS], slots_of_ranks)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, in_features, generator=generator).bfloat16()
    out = torch.randn(num_tokens, sum(WIDTHS), generator=generator).bfloat16()
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    expected = out.float()
    lora_linear(expected, x.float(), make_lora_segments(slots, 3), as_float, (0, 1, 2), WIDTHS)
    segments = make_lora_segments(slots.to(GPU), 3, LoraWorkspace(GPU))
    first = None
    for _ in range(20):
        got = out.to(GPU)
        lora_linear(got, x.to(GPU), segments, on_gpu, (0, 1, 2), WIDTHS)
        first = got if first is None else first
        assert torch.equal(got, first)
    assert first is not None
    assert relative_error(first.cpu(), expected) < TOLERANCE[torch.bfloat16]
    same = (slots < 0) | (slots == 2)
    assert torch.equal(first.cpu()[same], out[same])


@pytest.mark.parametrize("num_tokens", [5, 60, 700])
def test_two_slices(num_tokens: int) -> None:
    """A fused dense gate_up, one slot with two A and one with one A."""
    as_float, on_gpu = _both([SiteShape(48, 160)], [[SlotSite(5, num_a=2)], [SlotSite(16)]])
    x = torch.randn(num_tokens, 48).bfloat16()
    slots = (torch.arange(num_tokens) % 3 - 1).to(torch.int32)
    expected = torch.zeros(num_tokens, 160)
    lora_linear(expected, x.float(), make_lora_segments(slots, 2), as_float, (0,), (160,), (2,))
    got = torch.zeros(num_tokens, 160, dtype=torch.bfloat16, device=GPU)
    segments = make_lora_segments(slots.to(GPU), 2, LoraWorkspace(GPU))
    lora_linear(got, x.to(GPU), segments, on_gpu, (0,), (160,), (2,))
    assert relative_error(got.cpu(), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_embedding(num_tokens: int) -> None:
    """Rows of A by token id, on a GPU."""
    as_float, on_gpu = _both([SiteShape(200, 96)], [[SlotSite(7)], [SlotSite(33)], [SlotSite(0)]])
    ids = torch.randint(0, 200, (num_tokens,), dtype=torch.int32)
    slots = (torch.arange(num_tokens) % 4 - 1).to(torch.int32).flip(0)
    out = torch.randn(num_tokens, 96).bfloat16()
    expected = out.float()
    lora_embedding(expected, ids, make_lora_segments(slots, 3), as_float, 0)
    got = out.to(GPU)
    lora_embedding(got, ids.to(GPU), make_lora_segments(slots.to(GPU), 3, LoraWorkspace(GPU)), on_gpu, 0)
    assert relative_error(got.cpu(), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_experts", [5, 32, 128, 160, 256])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_routing(num_experts: int, num_tokens: int) -> None:
    """Choice is equal, ties included, and weights agree."""
    logits = torch.randn(num_tokens, num_experts).to(torch.bfloat16).float()
    for renormalize in (True, False):
        want = route_softmax_reference(logits, 4, renormalize=renormalize)
        got = route_softmax(logits.to(GPU), 4, renormalize=renormalize)
        assert torch.equal(got[1].cpu(), want[1])
        torch.testing.assert_close(got[0].cpu(), want[0])
    want = route_sigmoid_reference(logits, 1)
    got = route_sigmoid(logits.to(GPU), 1)
    assert torch.equal(got[1].cpu(), want[1])
    if num_experts % 8 == 0:
        want = route_softmax_grouped_reference(logits, 4, num_groups=8, top_k_groups=3, scale=16.0)
        got = route_softmax_grouped(logits.to(GPU), 4, num_groups=8, top_k_groups=3, scale=16.0)
        assert torch.equal(got[1].cpu(), want[1])
        torch.testing.assert_close(got[0].cpu(), want[0])
        bias = torch.randn(num_experts)
        want = route_sigmoid_grouped_reference(
            logits, bias, 4, num_groups=8, top_k_groups=4, renormalize=True, scale=2.5
        )
        got = route_sigmoid_grouped(
            logits.to(GPU), bias.to(GPU), 4, num_groups=8, top_k_groups=4, renormalize=True, scale=2.5
        )
        # sigmoids of the two devices differ in the last bit, so near-ties may swap: weights must agree
        torch.testing.assert_close(got[0].cpu().sort(1).values, want[0].sort(1).values, rtol=1e-4, atol=1e-5)
