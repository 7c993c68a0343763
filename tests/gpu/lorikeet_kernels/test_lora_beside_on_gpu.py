"""LoRA on a second stream on a GPU: deltas stored alone, who adds them, whole experts; bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.attention.attention_inputs import attention_inputs
from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import WeightScaling
from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation
from lorikeet_kernels.dense.linear import linear
from lorikeet_kernels.dense.rms_norm import rms_norm
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.moe_experts import (
    ExpertProjection,
    ExpertsLora,
    device_expert_weight,
    moe_experts,
)
from lorikeet_kernels.experts.moe_sum import SharedRows
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.routing import RouterLora, route_softmax
from lorikeet_kernels.lora.joined_linear import joined_linear
from lorikeet_kernels.lora.lora_linear import lora_linear
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.testing import (
    TOLERANCE,
    SiteShape,
    SlotSite,
    exact_delta,
    make_tables,
    relative_error,
)
from lorikeet_kernels.tiling.lora_overlap import BesideRows
from tests.support.fp8_matrices import fp8_matrices

GPU = torch.device("cuda")
BF16 = torch.bfloat16
WIDTHS = (192, 64, 48)
SLOTS = [
    [SlotSite(8), SlotSite(0), SlotSite(3)],
    [SlotSite(33), SlotSite(16), SlotSite(16)],
    [SlotSite(0), SlotSite(0), SlotSite(0)],
]
ACTIVATION = GatedActivation(1.702, 7.0, 1.0)


def to_gpu(tables: LoraTables) -> LoraTables:
    """The same tables on the device."""
    moved = (t.to(GPU) for t in (tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a))
    return LoraTables(*moved, max_rank=tables.max_rank)


def bits(values: torch.Tensor) -> torch.Tensor:
    """To compare zeros' signs, too."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def replays(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`run` once, then captured on a stream of higher priority and replayed over poison: all equal."""
    eager = run()
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for _ in range(10):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(captured), bits(eager))
    return eager


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 40, 64, 300, 1500])
@pytest.mark.parametrize("max_rank", [16, 32, 33])
def test_dense_delta_beside_the_base(num_tokens: int, max_rank: int) -> None:
    """Stored alone over NaN, by token, by segment and grouped; added later: the bits of the sum in place."""
    in_features = 1000
    slots_of_ranks = [[SlotSite(min(s.rank, max_rank)) for s in row] for row in SLOTS]
    tables = make_tables([SiteShape(in_features, w) for w in WIDTHS], slots_of_ranks, dtype=BF16)
    on_gpu = to_gpu(tables)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, in_features, generator=generator).to(BF16)
    base = torch.randn(num_tokens, sum(WIDTHS), generator=generator).to(BF16).to(GPU)
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    segments = make_lora_segments(slots.to(GPU), 3, LoraWorkspace(GPU))
    rows = x.to(GPU)
    side = SideStream.on(GPU, BesideRows())
    common = (segments, on_gpu, (0, 1, 2), WIDTHS)

    def in_place() -> torch.Tensor:
        y = base.clone()
        lora_linear(y, rows, *common)
        return y

    def beside() -> torch.Tensor:
        delta = torch.full((num_tokens, sum(WIDTHS)), float("nan"), device=GPU)
        y = side.beside(base.clone, lambda: lora_linear(delta, rows, *common, accumulate=False))
        return y.add_(delta)

    assert torch.equal(bits(replays(beside)), bits(in_place()))
    delta = torch.full((num_tokens, sum(WIDTHS)), float("nan"), device=GPU)
    lora_linear(delta, rows, *common, accumulate=False)
    same = ((slots < 0) | (slots == 2)).to(GPU)
    assert not delta[same].any()
    assert delta[same].signbit().all()
    expected = torch.zeros(num_tokens, sum(WIDTHS))
    rest = (tables.a_offset, tables.b_offset, tables.rank, tables.num_a, tables.max_rank)
    as_float = LoraTables(tables.arena.float(), *rest)
    lora_linear(expected, x.float(), make_lora_segments(slots, 3), as_float, (0, 1, 2), WIDTHS)
    if expected.any():
        assert relative_error(delta.cpu(), expected) < TOLERANCE[BF16]


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("max_rank", [16, 32])
@pytest.mark.parametrize("kind", [None, "block", "channel"])
@pytest.mark.parametrize(
    "sizes", [(2048, (4096, 512, 512)), (4096, (2048,)), (2880, (4096, 512, 512)), (28672, (1024,))]
)
def test_dense_delta_in_the_projections_launch(
    num_tokens: int, max_rank: int, kind: WeightScaling | None, sizes: tuple[int, tuple[int, ...]]
) -> None:
    """The bits of the projection by itself and of the delta beside it; its reader starts ahead."""
    in_features, widths = sizes
    sites, slices = tuple(range(len(widths))), (1,) * len(widths)
    slots_of_ranks = [[SlotSite(min(s.rank, max_rank)) for s in row[: len(widths)]] for row in SLOTS]
    on_gpu = to_gpu(make_tables([SiteShape(in_features, w) for w in widths], slots_of_ranks, dtype=BF16))
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, in_features, generator=generator).to(BF16).to(GPU)
    if kind is None:
        random = torch.randn(sum(widths), in_features, generator=generator) * in_features**-0.5
        weight, project = random.to(BF16).to(GPU), linear
    else:
        weight, project = fp8_matrices((sum(widths), in_features), kind, widths), fp8_linear
    bias = torch.randn(sum(widths), generator=generator).to(BF16).to(GPU)
    scale = torch.rand(sum(widths), generator=generator).to(BF16).to(GPU)
    slots = torch.tensor([0, -1, 1, 2][:num_tokens], dtype=torch.int32)
    segments = make_lora_segments(slots.to(GPU), 3, LoraWorkspace(GPU))

    def joined() -> torch.Tensor:
        made = joined_linear(x, weight, bias, segments, on_gpu, sites, widths, slices)
        if made is None:
            pytest.skip("another kernel is the faster way to project so many rows")
        return rms_norm(made[0], scale, 1e-5, delta=made[1], delta_is_joined=True)

    y, delta = project(x, weight, bias), torch.full((num_tokens, sum(widths)), float("nan"), device=GPU)
    lora_linear(delta, x, segments, on_gpu, sites, widths, accumulate=False)
    made = joined_linear(x, weight, bias, segments, on_gpu, sites, widths, slices)
    if made is not None:
        assert torch.equal(bits(made[0]), bits(y))
        assert torch.equal(bits(made[1]), bits(delta))
    assert torch.equal(bits(replays(joined)), bits(rms_norm(y, scale, 1e-5, delta=delta)))


@pytest.mark.parametrize("num_tokens", [1, 13, 300])
def test_readers_of_a_delta(num_tokens: int) -> None:
    """Norm, activation and attention's inputs: as if the rounded sum had been stored before."""

    def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, delta = torch.randn(shape, device=GPU).to(BF16), torch.randn(shape, device=GPU)
        return y, delta, (y.float() + delta).to(BF16)

    y, delta, whole = pair(num_tokens, 2880)
    weight, residual = torch.rand(2880, device=GPU).to(BF16), torch.randn_like(y)
    kept = residual.clone()
    got = rms_norm(y, weight, 1e-5, residual, delta)
    assert torch.equal(got, rms_norm(whole, weight, 1e-5, kept))
    assert torch.equal(residual, kept)

    y, delta, whole = pair(num_tokens, 1202)
    for order in ("interleaved", "concatenated"):
        for activation in (GatedActivation(), ACTIVATION):
            got = gated_activation(y, activation, row_order=order, delta=delta)
            assert torch.equal(got, gated_activation(whole, activation, row_order=order))

    y, delta, whole = pair(num_tokens, 80, 64)
    positions = torch.randint(0, 100, (num_tokens,), device=GPU)
    table, places = torch.randn(100, 2, 32, device=GPU), torch.randperm(320, device=GPU)[:num_tokens]
    caches = [torch.zeros(20, 16, 8, 64, dtype=BF16, device=GPU) for _ in range(4)]
    norm = torch.rand(72, 64, device=GPU).to(BF16)
    settings = {"norm_weight": norm, "eps": 1e-5, "positions": positions, "table": table}
    got = attention_inputs(y, caches[0], caches[1], places, delta=delta, **settings)
    assert torch.equal(got, attention_inputs(whole, caches[2], caches[3], places, **settings))
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("num_tokens", [1, 13, 64, 256])
@pytest.mark.parametrize("experts", [32, 128])
def test_routing_with_adapters(num_tokens: int, experts: int) -> None:
    """Logits of the router with each row's adapter, against float64; rows of others, the same bits each time.

    Logits far apart, so that no choice depends on a rounding; slots without a router adapter leave weights
    and choice as they are.
    """
    hidden = 2880
    tables = make_tables(
        [SiteShape(hidden, experts)], [[SlotSite(32)], [SlotSite(0)], [SlotSite(7)]], dtype=BF16
    )
    slots = (torch.arange(num_tokens, dtype=torch.int32) % 4).to(torch.int32) - 1
    if num_tokens == 1:
        slots += 1
    x = torch.randn(num_tokens, hidden).to(BF16)
    logits = torch.stack([torch.randperm(experts) for _ in range(num_tokens)]).to(BF16)
    deltas = [
        exact_delta(x[t], tables, int(slots[t]), 0, 0, experts, "concatenated") for t in range(num_tokens)
    ]
    source = torch.randint(0, num_tokens, (num_tokens,))
    lora = RouterLora(x.to(GPU), make_lora_segments(slots.to(GPU), 3, LoraWorkspace(GPU)), to_gpu(tables), 0)
    for rows in (None, source):
        whole = (logits.double() + torch.stack(deltas)).to(BF16)
        whole = whole if rows is None else whole[rows]
        first = None
        for _ in range(10):
            got = route_softmax(
                logits.to(GPU), 4, renormalize=True, lora=lora,
                source_rows=None if rows is None else rows.to(GPU),
            )  # fmt: skip
            first = got if first is None else first
            assert torch.equal(got[0], first[0])
            assert torch.equal(got[1], first[1])
        assert first is not None
        # the values of what was chosen are the best there are, whatever the order of near-ties
        best = whole.float().topk(4).values
        chosen = whole.float().gather(1, first[1].cpu().long())
        torch.testing.assert_close(chosen, best, rtol=0.02, atol=0.02)
    base = route_softmax(logits.to(GPU), 4, renormalize=True)
    got = route_softmax(logits.to(GPU), 4, renormalize=True, lora=lora)
    same = ((slots < 0) | (slots == 1)).to(GPU)
    assert torch.equal(got[0][same], base[0][same])
    assert torch.equal(got[1][same], base[1][same])


@pytest.mark.parametrize("kind", ["mxfp4", "bf16", "fp8"])
@pytest.mark.parametrize("row_order", ["interleaved", "concatenated"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 32, 64])
def test_experts_beside(num_tokens: int, row_order: RowOrder, kind: str) -> None:
    """Each part beside its GEMM in a graph, alone and both, or down's in it: the bits of LoRA before GEMMs.

    Rows without an adapter have those of experts without LoRA; a shared expert's rows are added as by torch.
    """
    experts, hidden, inner, top_k = 8, 256, 192, 2
    released = []
    for out_features, in_features in ((2 * inner, hidden), (hidden, inner)):
        shape = (experts, out_features, in_features // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=GPU)
        scales = torch.randint(115, 124, shape, dtype=torch.uint8, device=GPU)
        released.append(Mxfp4Weight(blocks, scales))
    if kind == "mxfp4":
        read = [device_expert_weight(w, BF16, o) for w, o in zip(released, (row_order, None), strict=True)]
    elif kind == "fp8":
        is_interleaved, heights = row_order == "interleaved", (inner, inner)
        shape = (experts, 2 * inner, hidden)
        read = [
            fp8_matrices(shape, "block", heights, is_interleaved=is_interleaved),
            fp8_matrices((experts, hidden, inner), "block", (hidden,)),
        ]
    else:
        sizes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
        read = [(torch.randn(size, device=GPU) / 16).to(BF16) for size in sizes]
    biases = [torch.randn(experts, w.shape[1], device=GPU).to(BF16) for w in read]
    gate_up = ExpertProjection(read[0], biases[0], row_order)
    down = ExpertProjection(read[1], biases[1], None)
    ranks = (8, 32, 0)
    tables = to_gpu(
        make_tables(
            [SiteShape(hidden, 2 * inner, experts), SiteShape(inner, hidden, experts)],
            [[SlotSite(r, 2), SlotSite(r)] for r in ranks],
            dtype=BF16,
        )
    )
    slots = (torch.arange(num_tokens, dtype=torch.int32) % 4).to(torch.int32) - (1 if num_tokens > 1 else 0)
    segments = make_lora_segments(slots.to(GPU), len(ranks), LoraWorkspace(GPU))
    ids = torch.rand(num_tokens, experts, device=GPU).topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, top_k, device=GPU)
    x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
    lora = ExpertsLora(segments, tables, 0, 1)
    before = moe_experts(x, weights, ids, gate_up, down, ACTIVATION, lora=lora)
    base = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    adapted = (slots >= 0) & (slots < 2)
    assert torch.equal(before[~adapted.to(GPU)], base[~adapted.to(GPU)])
    assert not torch.equal(before[adapted.to(GPU)], base[adapted.to(GPU)])
    every, never = range(1, 257), range(0)
    ways = ((every, never, never), (never, every, never), (every, every, never), (every, every, every))
    for of_gate_up, of_down, of_both in ways:
        rows = BesideRows(never, of_gate_up, of_gate_up, of_gate_up, of_down, never, of_both)
        aside = replace(lora, side=SideStream.on(GPU, rows))
        got = replays(lambda aside=aside: moe_experts(x, weights, ids, gate_up, down, ACTIVATION, lora=aside))
        assert torch.equal(got, before), rows
        made, added = torch.randn_like(x), torch.randn(x.shape, device=GPU)
        for shared, whole in ((SharedRows(made), made), (SharedRows(made, added), (made + added).to(BF16))):
            got = moe_experts(x, weights, ids, gate_up, down, ACTIVATION, lora=aside, shared=shared)
            assert torch.equal(got, before + whole), rows
