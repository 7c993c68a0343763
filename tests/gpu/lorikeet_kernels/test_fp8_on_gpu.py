"""FP8 on a GPU: quantised rows bit for bit, products against float64, whole layers, no compilation."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.dense.fp8_linear import fp8_linear
from lorikeet_kernels.dense.fp8_weight import (
    Fp8Weight,
    WeightScaling,
    dequantize_fp8,
)
from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation_reference
from lorikeet_kernels.dense.quantize_rows import (
    E4M3,
    ActivationScaling,
    dequantize_rows,
    quantize_rows,
    quantize_rows_reference,
)
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_blocks import expert_blocks
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.moe_experts import ExpertProjection, ExpertsLora, moe_experts
from lorikeet_kernels.experts.moe_sum import moe_sum_parts
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import SiteShape, SlotSite, exact_delta, make_tables, relative_error
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles
from lorikeet_kernels.warm_up import warm_up_moe
from lorikeet_kernels.warm_up_base import warm_up_experts, warm_up_fp8_linear
from tests.support.fp8_matrices import GROUPS, TOKEN, fp8_matrices

GPU = torch.device("cuda")
BF16 = torch.bfloat16
# A rounding to bf16, and products of e4m3 that tensor cores add up with 13 bits of fraction, 128 at a time.
TOLERANCE = 5e-3
ACTIVATION = GatedActivation(1.702, 7.0, 1.0)
KINDS: tuple[WeightScaling, ...] = ("block", "channel")
TILES = (
    ExpertTiles("decode", 16, 64, 128, 4, 4),
    ExpertTiles("decode", 16, 32, 64, 3, 2),
    ExpertTiles("decode", 32, 128, 128, 2, 4),
    ExpertTiles("prefill", 64, 128, 128, 3, 4),
    ExpertTiles("prefill", 128, 128, 128, 3, 8),
    ExpertTiles("prefill", 64, 64, 128, 4, 4, max_registers=168),
)
SPECIALIZED = (
    ExpertTiles("specialized", 192, 128, 128, 4, 16),
    ExpertTiles("specialized", 192, 128, 128, 3, 16),
    ExpertTiles("specialized", 128, 128, 128, 6, 12),
)
# experts, hidden, inner, top_k: whole blocks, ragged ones, ragged steps
SHAPES = ((4, 256, 128, 2), (5, 384, 192, 2), (3, 208, 80, 1))
TOKENS = (1, 13, 300)


def route(tokens: int, experts: int, top_k: int, popularity: str) -> torch.Tensor:
    """Distinct experts for each token, or the same for all."""
    if popularity == "identical":
        ids = torch.arange(top_k, device=GPU).flip(0).expand(tokens, -1)
    else:
        ids = torch.rand(tokens, experts, device=GPU).topk(top_k, dim=1).indices
    return ids.to(torch.int32).contiguous()


def products(x: torch.Tensor, weight: Fp8Weight, ids: torch.Tensor) -> torch.Tensor:
    """Float64 [T, K, out] of rows quantised by the reference, an expert at a time."""
    wide = dequantize_rows(quantize_rows_reference(x, weight.activations)).double()
    out = torch.empty(*ids.shape, weight.shape[1], dtype=torch.float64, device=GPU)
    for expert in range(weight.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        rows = wide[token] if x.dim() == 2 else wide[token, k]
        out[token, k] = rows @ dequantize_fp8(weight.expert(expert), torch.float64).T
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(1, 128), (37, 2048), (5, 3, 300), (300, 5120), (50, 5120), (1, 28672), (2, 28672), (200, 28672)],
)
def test_quantized_rows_have_the_references_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every scaling, with rows of zeros and values that saturate, in both orders of scales."""
    x = (torch.randn(shape, device=GPU) * torch.rand(shape, device=GPU).pow(6) * 40).to(dtype)
    x[-1] = 0.0
    for scaling in (
        GROUPS,
        TOKEN,
        ActivationScaling("token", bound=9.0),
        ActivationScaling("static", torch.tensor([0.03], device=GPU)),
    ):
        expected = quantize_rows_reference(x, scaling)
        other = quantize_rows(x, scaling, by_group=True)
        got = quantize_rows(x, scaling)
        rows = len(expected.scales)
        in_rows = other.values.view(-1, shape[-1])[:rows].view(shape)
        assert torch.equal(got.scales, expected.scales)
        assert torch.equal(other.scales[:rows], expected.scales)
        assert torch.equal(in_rows.view(torch.uint8), got.values.view(torch.uint8))
        assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


def test_what_is_no_number_stays_so() -> None:
    """A NaN and an infinity reach their own row and no other."""
    x = torch.ones(4, 256, device=GPU, dtype=BF16)
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    for scaling in (TOKEN, GROUPS):
        back = dequantize_rows(quantize_rows(x, scaling))
        assert back[1, 3].isnan()
        assert not back[2, 200].isfinite()
        assert torch.equal(back[[0, 3]], x[[0, 3]].float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_order", ["interleaved", "concatenated"])
@pytest.mark.parametrize(("experts", "hidden", "inner", "top_k"), SHAPES)
def test_gate_up(
    experts: int, hidden: int, inner: int, top_k: int, row_order: RowOrder, kind: WeightScaling
) -> None:
    """Activation with a bias, with and without a delta, and plain rows, by every tile."""
    weight = fp8_matrices(
        (experts, 2 * inner, hidden), kind, (inner, inner), is_interleaved=row_order == "interleaved"
    )
    bias = torch.randn(experts, 2 * inner, device=GPU).to(BF16)
    plain_rows = row_order == "concatenated"
    for num_tokens in TOKENS:
        for popularity in ("uniform", "identical"):
            ids = route(num_tokens, experts, top_k, popularity)
            x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
            rows = products(x, weight, ids) + bias.double()[ids.long()]
            stored = rows.to(BF16)
            delta = torch.randn(stored.shape, device=GPU).to(BF16)
            quantized = quantize_rows(x, weight.activations)
            is_whole = kind == "block" and hidden % 128 == 0 and inner % 128 == 0 and plain_rows
            for tiles in (*TILES, *SPECIALIZED) if is_whole else TILES:
                blocks = expert_blocks(ids, experts, tiles.block_rows)
                plain = torch.full_like(stored, float("nan"))
                fp8_gemm(quantized, weight, blocks, plain, tiles, bias=bias)
                assert relative_error(plain, rows) < TOLERANCE
                for added in (None, delta):
                    whole = stored if added is None else (stored.float() + added.float()).to(BF16)
                    expected = gated_activation_reference(whole.float(), ACTIVATION, row_order=row_order)
                    out = x.new_full((num_tokens, top_k, inner), float("nan"))
                    fp8_gemm(
                        quantized, weight, blocks, out, tiles,
                        bias=bias, activation=ACTIVATION, row_order=row_order, delta=added,
                    )  # fmt: skip
                    assert relative_error(out, expected) < 2 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "hidden", "inner", "top_k"), SHAPES)
def test_down(experts: int, hidden: int, inner: int, top_k: int, kind: WeightScaling) -> None:
    """Routed weights, whole by every tile and split."""
    weight = fp8_matrices((experts, hidden, inner), kind, (hidden,))
    for num_tokens in TOKENS:
        ids = route(num_tokens, experts, top_k, "uniform")
        routed = torch.rand(num_tokens, top_k, device=GPU)
        act = torch.randn(num_tokens, top_k, inner, device=GPU).to(BF16)
        pairs = products(act, weight, ids) * routed.double().unsqueeze(-1)
        quantized = quantize_rows(act, weight.activations)
        is_whole = kind == "block" and hidden % 128 == 0 and inner % 128 == 0
        for tiles in (*TILES, *SPECIALIZED) if is_whole else TILES:
            blocks = expert_blocks(ids, experts, tiles.block_rows)
            out = act.new_full(pairs.shape, float("nan"))
            fp8_gemm(quantized, weight, blocks, out, tiles, topk_weights=routed)
            assert relative_error(out, pairs) < TOLERANCE
            if tiles.kernel == "specialized":
                continue
            parts = torch.full((2, *pairs.shape), float("nan"), device=GPU)
            fp8_gemm(quantized, weight, blocks, parts, replace(tiles, splits=2))
            total = act.new_full((num_tokens, hidden), float("nan"))
            moe_sum_parts(parts, total, ids, routed)
            assert relative_error(total, pairs.sum(1)) < TOLERANCE


@pytest.mark.parametrize("tiles", SPECIALIZED)
@pytest.mark.parametrize("num_tokens", [1, 257, 2900])
@pytest.mark.parametrize("inner", [128, 256, 640])
def test_warps_that_load_and_warps_that_multiply(num_tokens: int, inner: int, tiles: ExpertTiles) -> None:
    """Several items a program, uneven ranges of tiles, experts with no pairs and with all of them.

    Down's rows of 128 and 256 columns stay in shared memory for an item.
    """
    experts, hidden, top_k = 24, 1152, 2
    gate_up, down = layer(experts, hidden, inner, "block")
    assert isinstance(gate_up.weight, Fp8Weight)
    assert isinstance(down.weight, Fp8Weight)
    x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
    routed = torch.rand(num_tokens, top_k, device=GPU)
    uniform = route(num_tokens, experts, top_k, "uniform")
    for ids in (uniform, uniform % 5, route(num_tokens, experts, top_k, "identical")):
        blocks = expert_blocks(ids, experts, tiles.block_rows)
        act = x.new_full((num_tokens, top_k, inner), float("nan"))
        fp8_gemm(
            quantize_rows(x, GROUPS), gate_up.weight, blocks, act, tiles,
            activation=ACTIVATION, row_order="concatenated",
        )  # fmt: skip
        rows = products(x, gate_up.weight, ids).to(BF16)
        assert relative_error(act, gated_activation_reference(rows.float(), ACTIVATION)) < 2 * TOLERANCE
        pairs = x.new_full((num_tokens, top_k, hidden), float("nan"))
        fp8_gemm(quantize_rows(act, GROUPS), down.weight, blocks, pairs, tiles, topk_weights=routed)
        assert (
            relative_error(pairs, products(act, down.weight, ids) * routed.double().unsqueeze(-1)) < TOLERANCE
        )
        again = torch.full_like(pairs, float("nan"))
        fp8_gemm(quantize_rows(act, GROUPS), down.weight, blocks, again, tiles, topk_weights=routed)
        assert torch.equal(again, pairs)


def layer(
    experts: int, hidden: int, inner: int, kind: WeightScaling
) -> tuple[ExpertProjection, ExpertProjection]:
    """Gate_up side by side, and down."""
    up = fp8_matrices((experts, 2 * inner, hidden), kind, (inner, inner))
    down = fp8_matrices((experts, hidden, inner), kind, (hidden,))
    return ExpertProjection(up, None, "concatenated"), ExpertProjection(down, None, None)


@pytest.mark.parametrize("num_tokens", [1, 16, 500])
@pytest.mark.parametrize("is_plain_first", [True, False])
def test_layer_of_two_storages(num_tokens: int, *, is_plain_first: bool) -> None:
    """One projection in FP8 of whole blocks, the other in bf16; one token, and many."""
    experts, hidden, inner, top_k = 8, 256, 128, 2
    gate_up, down = layer(experts, hidden, inner, "block")
    assert isinstance(gate_up.weight, Fp8Weight)
    assert isinstance(down.weight, Fp8Weight)
    if is_plain_first:
        gate_up = replace(gate_up, weight=dequantize_fp8(gate_up.weight, BF16))
    else:
        down = replace(down, weight=dequantize_fp8(down.weight, BF16))
    ids = route(num_tokens, experts, top_k, "uniform")
    weights = torch.rand(num_tokens, top_k, device=GPU)
    x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)

    def multiplied(rows: torch.Tensor, part: ExpertProjection) -> torch.Tensor:
        if isinstance(part.weight, Fp8Weight):
            return products(rows, part.weight, ids)
        assert isinstance(part.weight, torch.Tensor)
        own = rows.unsqueeze(1).expand(-1, top_k, -1) if rows.dim() == 2 else rows
        return torch.einsum("tki,tkoi->tko", own.double(), part.weight[ids.long()].double())

    act = gated_activation_reference(multiplied(x, gate_up).to(BF16), ACTIVATION)
    expected = (multiplied(act, down) * weights.double().unsqueeze(-1)).sum(1)
    got = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    assert relative_error(got, expected) < 4 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 16, 500])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (1024, 256)])
def test_whole_layer_in_a_graph(hidden: int, inner: int, num_tokens: int, kind: WeightScaling) -> None:
    """The shipped tiles; five replays over poisoned memory give the same bits."""
    experts, top_k = 16, 4
    gate_up, down = layer(experts, hidden, inner, kind)
    assert isinstance(gate_up.weight, Fp8Weight)
    assert isinstance(down.weight, Fp8Weight)
    ids = route(num_tokens, experts, top_k, "uniform")
    weights = torch.rand(num_tokens, top_k, device=GPU)
    x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
    rows = products(x, gate_up.weight, ids).to(BF16)
    act = gated_activation_reference(rows, ACTIVATION)
    expected = (products(act, down.weight, ids) * weights.double().unsqueeze(-1)).sum(1)
    eager = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    # an activation that rounds to the neighbouring bf16 may quantise to the neighbouring e4m3
    assert relative_error(eager, expected) < 4 * TOLERANCE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    for _ in range(5):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)


@pytest.mark.parametrize("num_tokens", [5, 400])
def test_adapters_see_rows_that_are_not_quantised(num_tokens: int) -> None:
    """Beside FP8 experts a delta is the float64 one of the bf16 input; rows without one keep their bits."""
    experts, hidden, inner, top_k = 8, 256, 128, 2
    gate_up, down = layer(experts, hidden, inner, "block")
    assert isinstance(gate_up.weight, Fp8Weight)
    assert isinstance(down.weight, Fp8Weight)
    sites = [SiteShape(hidden, 2 * inner, experts), SiteShape(inner, hidden, experts)]
    tables = make_tables(sites, [[SlotSite(8, 2), SlotSite(8)]] * 2, dtype=BF16, device="cuda")
    slots = torch.arange(num_tokens, dtype=torch.int32, device=GPU) % 3 - 1
    lora = ExpertsLora(make_lora_segments(slots, 2, LoraWorkspace(GPU)), tables, 0, 1)
    ids = route(num_tokens, experts, top_k, "uniform")
    weights = torch.rand(num_tokens, top_k, device=GPU)
    x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
    got = moe_experts(x, weights, ids, gate_up, down, ACTIVATION, lora=lora)
    plain = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    assert torch.equal(got[slots < 0], plain[slots < 0])
    rows = products(x, gate_up.weight, ids).to(BF16).double()
    for t in range(num_tokens):
        for k in range(top_k):
            rows[t, k] += exact_delta(
                x[t], tables, int(slots[t]), 0, int(ids[t, k]), 2 * inner, "concatenated"
            )
    act = gated_activation_reference(rows.to(BF16), ACTIVATION)
    pairs = products(act, down.weight, ids)
    for t in range(num_tokens):
        for k in range(top_k):
            pairs[t, k] += exact_delta(
                act[t, k], tables, int(slots[t]), 1, int(ids[t, k]), hidden, "concatenated"
            )
    expected = (pairs * weights.double().unsqueeze(-1)).sum(1)
    assert relative_error(got, expected) < 4 * TOLERANCE


def test_neighbours_do_not_change_a_pair() -> None:
    """A token's bits are the same whatever the other tokens of a batch of the same size are and route to."""
    experts, hidden, inner, top_k = 8, 256, 128, 2
    gate_up, down = layer(experts, hidden, inner, "block")
    for num_tokens in (40, 900):
        x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
        seen: list[torch.Tensor] = []
        for _ in range(3):
            x[1:] = torch.randn(num_tokens - 1, hidden, device=GPU) * 10
            ids = route(num_tokens, experts, top_k, "uniform")
            ids[0] = torch.tensor([3, 5], dtype=torch.int32)
            weights = torch.ones(num_tokens, top_k, device=GPU)
            seen.append(moe_experts(x, weights, ids, gate_up, down, ACTIVATION)[0])
        assert all(torch.equal(other, seen[0]) for other in seen[1:])


def test_values_beyond_two_to_the_31() -> None:
    """The last of 1,100 experts of 2^21 values lies past 2^31."""
    experts, out_features, in_features = 1100, 2048, 1024
    values = torch.zeros(experts, out_features, in_features, dtype=torch.uint8, device=GPU).view(E4M3)
    scales = torch.zeros(experts, out_features // 128, in_features // 128, device=GPU)
    last = fp8_matrices((1, out_features, in_features), "block", (out_features,))
    values[-1].view(torch.uint8).copy_(last.values[0].view(torch.uint8))
    scales[-1] = last.scales[0]
    weight = Fp8Weight(values, scales, GROUPS)
    for num_tokens, tiles in ((3, TILES[0]), (200, TILES[4])):
        ids = torch.full((num_tokens, 1), experts - 1, dtype=torch.int32, device=GPU)
        x = torch.randn(num_tokens, in_features, device=GPU).to(BF16)
        out = x.new_empty((num_tokens, 1, out_features))
        blocks = expert_blocks(ids, experts, tiles.block_rows)
        fp8_gemm(quantize_rows(x, GROUPS), weight, blocks, out, tiles)
        expected = products(x, last, torch.zeros_like(ids))
        assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_compiles_after_warm_up(kind: WeightScaling, compiled: list[str]) -> None:
    """Random numbers of tokens through experts, with and without adapters, and a dense projection."""
    experts, hidden, inner, top_k, most = 8, 256, 128, 2, 700
    gate_up, down = layer(experts, hidden, inner, kind)
    dense = fp8_matrices((384, 4096), kind, (384,))
    sites = [SiteShape(hidden, 2 * inner, experts), SiteShape(inner, hidden, experts)]
    tables = make_tables(sites, [[SlotSite(8, 2), SlotSite(8)]] * 2, dtype=BF16, device="cuda")
    workspace = LoraWorkspace(GPU)

    def adapters(num_tokens: int) -> ExpertsLora:
        slots = torch.randint(-1, 2, (num_tokens,), dtype=torch.int32, device=GPU)
        return ExpertsLora(make_lora_segments(slots, 2, workspace), tables, 0, 1)

    warm_up_moe(
        tables, workspace, hidden=hidden, inner=inner, num_experts=experts, top_k=top_k, gate_up_site=0,
        down_site=1, row_order="concatenated", max_tokens=most,
    )  # fmt: skip
    warm_up_experts(gate_up, down, ACTIVATION, dtype=BF16, top_k=top_k, max_tokens=most, lora=adapters(1))
    warm_up_fp8_linear(dense, None, dtype=BF16, max_tokens=most)
    compiled.clear()
    for num_tokens in (1, 2, 3, 15, 16, 17, 33, 64, 65, 100, 128, 255, 300, 511, 512, 513, 699, 700):
        x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
        ids = route(num_tokens, experts, top_k, "uniform")
        weights = torch.rand(num_tokens, top_k, device=GPU)
        for lora in (None, adapters(num_tokens)):
            moe_experts(x, weights, ids, gate_up, down, ACTIVATION, lora=lora)
        fp8_linear(torch.randn(num_tokens, 4096, device=GPU).to(BF16), dense)
    assert compiled == []
