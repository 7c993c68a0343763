"""Router logits in parts on a GPU: against float64, routed as their sum is, in graphs, nothing compiled."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lorikeet_kernels.benchmarking.graph_timing import capture
from lorikeet_kernels.dense.rms_norm import rms_norm
from lorikeet_kernels.experts.router_logits import LogitParts, router_in_parts, router_logits
from lorikeet_kernels.experts.routing import RouterLora, route_sigmoid_grouped, route_softmax
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling import router_tiles as tiling
from lorikeet_kernels.tiling.router_tiles import MAX_ROWS, RouterTiles, router_tiles
from lorikeet_kernels.warm_up_base import warm_up_router

GPU = torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = ((32, 2880), (128, 2048), (256, 7168), (13, 104))


def router_adapters(experts: int, hidden: int, dtype: torch.dtype) -> Callable[[torch.Tensor], RouterLora]:
    """Adapters of two slots, of which rows have the first, the second and none in turn."""
    slots = [[SlotSite(8)], [SlotSite(3)]]
    tables = make_tables([SiteShape(hidden, experts)], slots, dtype=dtype, device=GPU)
    workspace = LoraWorkspace(GPU)

    def of(x: torch.Tensor) -> RouterLora:
        slots = (torch.arange(x.shape[0], dtype=torch.int32, device=GPU) % 3 - 1).to(torch.int32)
        return RouterLora(x, make_lora_segments(slots, 2, workspace), tables, 0)

    return of


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("experts", "hidden"), SHAPES)
def test_parts(experts: int, hidden: int, dtype: torch.dtype) -> None:
    """1 to 64 rows: the sum's error, a row's own bits, routing by parts as by their sum."""
    weight, bias = (
        torch.randn(experts, hidden, device=GPU).to(dtype),
        torch.randn(experts, device=GPU).to(dtype),
    )
    x = torch.randn(MAX_ROWS, hidden, device=GPU).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    rows: list[torch.Tensor] = []
    lora = router_adapters(experts, hidden, dtype)
    for num_rows in (1, 7, 16, 17, 33, 64):
        parts = router_logits(x[:num_rows], weight, bias, router_tiles(hidden))
        assert relative_error(parts.whole(), exact[:num_rows]) < TOLERANCE[dtype]
        rows.append(parts.parts[:, 0])
        source = torch.arange(num_rows, device=GPU).flip(0)
        adapters = lora(x[:num_rows])
        for added, source_rows in ((None, None), (adapters, None), (None, source), (adapters, source)):
            options = {"renormalize": True, "lora": added, "source_rows": source_rows}
            got, expected = (route_softmax(logits, 4, **options) for logits in (parts, parts.whole()))
            assert torch.equal(got[1], expected[1])
            assert torch.equal(got[0], expected[0])
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_the_same_experts_as_the_projections_logits() -> None:
    """Rounded once to the model's dtype: but for logits that round to neighbours, experts are the same."""
    x, weight = torch.randn(64, 2880, device=GPU).to(BF16), torch.randn(32, 2880, device=GPU).to(BF16) / 54
    bias = torch.randn(32, device=GPU).to(BF16)
    parts = router_logits(x, weight, bias, router_tiles(2880))
    projected = F.linear(x, weight, bias)
    assert float((parts.whole() != projected).float().mean()) < 0.02
    assert relative_error(parts.whole(), projected) < 1e-3


def test_behind_a_running_launch_in_a_graph() -> None:
    """Norm, logits, routing, captured and replayed over poisoned parts: what ran one by one gives."""
    weight, bias = torch.randn(32, 2880, device=GPU).to(BF16), torch.randn(32, device=GPU).to(BF16)
    scale, x = torch.rand(2880, device=GPU).to(BF16), torch.randn(32, 2880, device=GPU).to(BF16)
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step() -> None:
        made.clear()
        for _ in range(8):
            parts = router_logits(rms_norm(x, scale, 1e-5), weight, bias, RouterTiles(128, 4))
            made.append(route_softmax(parts, 4, renormalize=True))

    graph = capture([step])
    captured = list(made)
    for _ in range(10):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        logits = router_logits(rms_norm(x, scale, 1e-5), weight, bias, RouterTiles(128, 4)).whole()
        expected = route_softmax(logits, 4, renormalize=True)
        for weights, ids in captured:
            assert torch.equal(ids, expected[1])
            assert torch.equal(weights, expected[0])


def test_nothing_compiles_after_the_warm_up(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    """Any number of rows, other weights, a bias between 16 bytes, adapters or none."""
    monkeypatch.setattr(tiling, "MOST_ROWS", {torch.cuda.get_device_name(): MAX_ROWS})
    counts = (1, 2, 15, 16, 17, 33, 64)
    weights = torch.randn(2, 32, 520, device=GPU).to(BF16)
    biases = torch.randn(65, device=GPU).to(BF16)[1:].view(2, 32)
    correction = torch.randn(33, device=GPU)[1:]
    grouped = partial(
        route_sigmoid_grouped,
        correction_bias=correction, top_k=4, num_groups=4, top_k_groups=2, renormalize=True, scale=2.5,
    )  # fmt: skip
    lora = router_adapters(32, 520, BF16)
    assert warm_up_router(weights[0], biases[0], grouped, lora, dtype=BF16, max_tokens=1000) == 2
    adapters = {num_rows: lora(torch.randn(num_rows, 520, device=GPU).to(BF16)) for num_rows in counts}
    compiled.clear()
    routed: list[tuple[LogitParts, dict[str, torch.Tensor | RouterLora | None], torch.Tensor]] = []
    for num_rows in counts:
        x = adapters[num_rows].x
        source = torch.arange(num_rows + 1, device=GPU)[1:] - 1
        for weight, bias in zip(weights, biases, strict=True):
            parts = router_in_parts(x, weight, bias)
            assert parts is not None
            for added in (None, adapters[num_rows]):
                for rows in (None, source):
                    options = {"lora": added, "source_rows": rows}
                    routed.append((parts, options, grouped(parts, **options)[1]))
    assert compiled == []
    for parts, options, ids in routed:
        assert torch.equal(ids, grouped(parts.whole(), **options)[1])
    assert router_in_parts(torch.zeros(65, 520, dtype=BF16, device=GPU), weights[0], None) is None
