"""The expert GEMMs on a GPU against float64: MXFP4 and bf16, every kernel, hard shapes, 64-bit offsets."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation_reference
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_blocks import expert_blocks, expert_blocks_reference, lone_blocks
from lorikeet_kernels.experts.expert_gemm import expert_gemm
from lorikeet_kernels.experts.moe_experts import ExpertProjection, device_expert_weight, moe_experts
from lorikeet_kernels.experts.moe_sum import moe_sum_parts, sum_pairs
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight, dequantize_mxfp4
from lorikeet_kernels.experts.mxfp4_layout import Mxfp4DeviceWeight, lay_out_mxfp4
from lorikeet_kernels.experts.mxfp4_linear import mxfp4_linear
from lorikeet_kernels.small_cases.small_case import moved
from lorikeet_kernels.testing import random_mxfp4_weight, relative_error
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

GPU = torch.device("cuda")
BF16 = torch.bfloat16
TOLERANCE = 5e-3
ACTIVATION = GatedActivation(1.702, 7.0, 1.0)
DECODE = ExpertTiles("decode", 8, 64, 1, 4, 4)
MXFP4_TILES = (
    DECODE,
    ExpertTiles("decode", 16, 128, 3, 3, 4),
    ExpertTiles("decode", 8, 32, 2, 2, 2),
    ExpertTiles("prefill", 32, 128, 2, 3, 8),
    ExpertTiles("prefill", 64, 128, 3, 2, 8),
    ExpertTiles("prefill", 128, 256, 3, 2, 8),
    ExpertTiles("prefill", 128, 128, 3, 2, 8, max_registers=128),
)
BF16_TILES = (
    ExpertTiles("decode", 16, 64, 128, 3, 4),
    ExpertTiles("prefill", 64, 128, 64, 3, 4),
    ExpertTiles("prefill", 128, 256, 64, 3, 8),
)
SHAPES = ((5, 96, 40, 2), (3, 64, 24, 1), (7, 160, 72, 3))  # experts, hidden, inner, top_k
TOKENS = (1, 7, 64, 300)


def random_mxfp4(experts: int, rows: int, columns: int) -> Mxfp4Weight:
    """Every code, scales around 2**-8; columns rounded up to a multiple of 32."""
    return moved(random_mxfp4_weight(experts, rows, columns, torch.Generator().manual_seed(rows)), GPU)


def route(tokens: int, experts: int, top_k: int, popularity: str) -> torch.Tensor:
    """Distinct experts for each token, or the same for all."""
    if popularity == "identical":
        ids = torch.arange(top_k, device=GPU).flip(0).expand(tokens, -1)
    else:
        ids = torch.rand(tokens, experts, device=GPU).topk(top_k, dim=1).indices
    return ids.to(torch.int32).contiguous()


def products(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """Float64 [T, K, out], an expert at a time."""
    out = torch.empty(*ids.shape, weight.shape[1], dtype=torch.float64, device=GPU)
    for expert in range(weight.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        rows = x[token] if x.dim() == 2 else x[token, k]
        out[token, k] = rows.double() @ weight[expert].double().T
        if bias is not None:
            out[token, k] += bias[expert].double()
    return out


@pytest.mark.parametrize("popularity", ["uniform", "identical"])
@pytest.mark.parametrize("num_tokens", [1, 13, 128, 300, 5000])
@pytest.mark.parametrize(("experts", "top_k"), [(32, 4), (5, 2), (128, 8)])
def test_blocks(experts: int, top_k: int, num_tokens: int, popularity: str) -> None:
    """Order and blocks are those of the reference, by one program and by many."""
    ids = route(num_tokens, experts, top_k, popularity)
    got, expected = expert_blocks(ids, experts, 16), expert_blocks_reference(ids.cpu(), experts, 16)
    assert torch.equal(got.order.cpu(), expected.order)
    assert torch.equal(got.blocks[:, :3].cpu(), expected.blocks[:, :3])


@pytest.mark.parametrize("row_order", ["interleaved", "concatenated"])
@pytest.mark.parametrize(("experts", "hidden", "inner", "top_k"), SHAPES)
def test_mxfp4(experts: int, hidden: int, inner: int, top_k: int, row_order: RowOrder) -> None:
    """Activation, delta, plain rows, routed weights and split parts by every kernel."""
    gate_up, down = random_mxfp4(experts, 2 * inner, hidden), random_mxfp4(experts, hidden, inner)
    laid_up, laid_down = lay_out_mxfp4(gate_up, pairing=row_order), lay_out_mxfp4(down)
    plain_up, plain_down = (dequantize_mxfp4(w, torch.float32) for w in (gate_up, down))
    up_bias = torch.randn(experts, 2 * inner, device=GPU).to(BF16)
    down_bias = torch.randn(experts, hidden, device=GPU).to(BF16)
    for num_tokens in TOKENS:
        for popularity in ("uniform", "identical"):
            ids = route(num_tokens, experts, top_k, popularity)
            weights = torch.rand(num_tokens, top_k, device=GPU)
            x = torch.randn(num_tokens, gate_up.in_features, device=GPU).to(BF16)
            act = torch.randn(num_tokens, top_k, down.in_features, device=GPU).to(BF16)
            rows = products(x, plain_up, up_bias, ids)
            delta = torch.randn(rows.shape, device=GPU).to(BF16)
            stored = rows.to(BF16)
            expected = gated_activation_reference(stored.float(), ACTIVATION, row_order=row_order)
            added = (stored.float() + delta.float()).to(BF16).float()
            with_delta = gated_activation_reference(added, ACTIVATION, row_order=row_order)
            pairs = products(act, plain_down, down_bias, ids) * weights.double().unsqueeze(-1)
            for tiles in MXFP4_TILES:
                blocks = expert_blocks(ids, experts, tiles.block_rows)
                out = act.new_full((num_tokens, top_k, inner), float("nan"))
                mxfp4_linear(x, laid_up, blocks, out, tiles, bias=up_bias, activation=ACTIVATION)
                assert relative_error(out, expected) < TOLERANCE
                out.fill_(float("nan"))
                mxfp4_linear(x, laid_up, blocks, out, tiles, bias=up_bias, activation=ACTIVATION, delta=delta)
                assert relative_error(out, with_delta) < TOLERANCE
                out = torch.full_like(stored, float("nan"))
                mxfp4_linear(x, laid_up, blocks, out, tiles, bias=up_bias)
                assert relative_error(out, rows) < TOLERANCE
                out = act.new_full(pairs.shape, float("nan"))
                mxfp4_linear(act, laid_down, blocks, out, tiles, bias=down_bias, topk_weights=weights)
                assert relative_error(out, pairs) < TOLERANCE
                total = sum_pairs(out, act.new_full((num_tokens, hidden), float("nan")))
                assert relative_error(total, pairs.sum(1)) < TOLERANCE
            blocks = expert_blocks(ids, experts, 8)
            parts = torch.full((3, *pairs.shape), float("nan"), device=GPU)
            mxfp4_linear(act, laid_down, blocks, parts, ExpertTiles("decode", 8, 64, 1, 4, 4, splits=3))
            total = act.new_full((num_tokens, hidden), float("nan"))
            moe_sum_parts(parts, total, ids, weights, bias=down_bias)
            assert relative_error(total, pairs.sum(1)) < TOLERANCE


@pytest.mark.parametrize("row_order", ["interleaved", "concatenated"])
@pytest.mark.parametrize(("experts", "hidden", "inner", "top_k"), SHAPES)
def test_bf16(experts: int, hidden: int, inner: int, top_k: int, row_order: RowOrder) -> None:
    """Activation with and without a delta, and routed weights, by every kernel."""
    gate_up = torch.randn(experts, 2 * inner, hidden, device=GPU).to(BF16)
    down = torch.randn(experts, hidden, inner, device=GPU).to(BF16)
    for num_tokens in TOKENS:
        for popularity in ("uniform", "identical"):
            ids = route(num_tokens, experts, top_k, popularity)
            weights = torch.rand(num_tokens, top_k, device=GPU)
            x = torch.randn(num_tokens, hidden, device=GPU).to(BF16)
            act = torch.randn(num_tokens, top_k, inner, device=GPU).to(BF16)
            stored = products(x, gate_up, None, ids).to(BF16)
            delta = torch.randn(stored.shape, device=GPU).to(BF16)
            pairs = products(act, down, None, ids) * weights.double().unsqueeze(-1)
            for tiles in BF16_TILES:
                blocks = expert_blocks(ids, experts, tiles.block_rows)
                for added in (None, delta):
                    rows = stored if added is None else (stored.float() + added.float()).to(BF16)
                    expected = gated_activation_reference(rows.float(), ACTIVATION, row_order=row_order)
                    out = act.new_full((num_tokens, top_k, inner), float("nan"))
                    expert_gemm(
                        x,
                        gate_up,
                        blocks,
                        out,
                        tiles,
                        activation=ACTIVATION,
                        row_order=row_order,
                        delta=added,
                    )
                    assert relative_error(out, expected) < TOLERANCE
                out = act.new_full(pairs.shape, float("nan"))
                expert_gemm(act, down, blocks, out, tiles, topk_weights=weights)
                assert relative_error(out, pairs) < TOLERANCE
                # behind another launch, whose end only x waits for, and of one token without a cut
                cuts = [blocks, lone_blocks(ids, experts, tiles.block_rows)][: 2 if num_tokens == 1 else 1]
                for cut, ahead in product(cuts, (0, 64, 4096)):
                    again = torch.full_like(out, float("nan"))
                    expert_gemm(
                        act,
                        down,
                        cut,
                        again,
                        replace(tiles, ahead=ahead),
                        topk_weights=weights,
                        weights_first=True,
                    )
                    assert torch.equal(again, out)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 500])
def test_whole_layer_in_a_graph(num_tokens: int, packed: bool) -> None:
    """gpt-oss-20b's sizes with the shipped tiles; ten replays over poisoned memory give the same bits."""
    experts, hidden, inner, top_k = 32, 2880, 2880, 4
    released = random_mxfp4(experts, 2 * inner, hidden), random_mxfp4(experts, hidden, inner)
    plain = [dequantize_mxfp4(w, BF16) for w in released]
    read = (
        [device_expert_weight(w, BF16, o) for w, o in zip(released, ("interleaved", None), strict=True)]
        if packed
        else plain
    )
    biases = [torch.randn(experts, w.shape[1], device=GPU).to(BF16) for w in plain]
    gate_up = ExpertProjection(read[0], biases[0], "interleaved")
    down = ExpertProjection(read[1], biases[1], None)
    ids = route(num_tokens, experts, top_k, "uniform")
    weights = torch.rand(num_tokens, top_k, device=GPU)
    x = (torch.randn(num_tokens, hidden, device=GPU) / 30).to(BF16)
    rows = products(x, plain[0], biases[0], ids).to(BF16).float()
    act = gated_activation_reference(rows, ACTIVATION, row_order="interleaved").to(BF16)
    expected = (products(act, plain[1], biases[1], ids) * weights.double().unsqueeze(-1)).sum(1)
    eager = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    assert relative_error(eager, expected) < TOLERANCE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_experts(x, weights, ids, gate_up, down, ACTIVATION)
    for _ in range(10):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)


def test_neighbours_do_not_change_a_pair() -> None:
    """A token's bits are the same whatever the other tokens of a batch of the same size route to."""
    experts, hidden, inner, top_k = 8, 128, 64, 2
    weight = lay_out_mxfp4(random_mxfp4(experts, 2 * inner, hidden), pairing="interleaved")
    x = torch.randn(40, hidden, device=GPU).to(BF16)
    seen: list[torch.Tensor] = []
    for _ in range(4):
        ids = route(40, experts, top_k, "uniform")
        ids[0] = torch.tensor([3, 5], dtype=torch.int32)
        for tiles in (DECODE, MXFP4_TILES[1]):
            out = x.new_empty((40, top_k, inner))
            blocks = expert_blocks(ids, experts, tiles.block_rows)
            seen.append(mxfp4_linear(x, weight, blocks, out, tiles, activation=ACTIVATION)[0])
    assert all(torch.equal(other, seen[0]) for other in seen[1:])


def test_words_beyond_two_to_the_31() -> None:
    """The last of 2,100 experts of 2^20 words lies past 2^31 words."""
    experts, out_features, in_features = 2100, 2048, 4096
    words = torch.zeros(experts, out_features // 16, in_features // 64, 128, dtype=torch.int32, device=GPU)
    scales = torch.zeros(experts, out_features // 16, in_features // 64, 8, dtype=torch.int32, device=GPU)
    released = random_mxfp4(1, out_features, in_features)
    laid = lay_out_mxfp4(released)
    words[-1], scales[-1] = laid.words[0], laid.scales[0]
    weight = Mxfp4DeviceWeight(words, scales, out_features, in_features, None, laid.exponent_shift)
    plain = dequantize_mxfp4(released, torch.float32)[0].double()
    for num_tokens, tiles in ((3, DECODE), (200, MXFP4_TILES[4])):
        ids = torch.full((num_tokens, 1), experts - 1, dtype=torch.int32, device=GPU)
        x = torch.randn(num_tokens, in_features, device=GPU).to(BF16)
        out = x.new_empty((num_tokens, 1, out_features))
        mxfp4_linear(x, weight, expert_blocks(ids, experts, tiles.block_rows), out, tiles)
        assert relative_error(out[:, 0], x.double() @ plain.T) < TOLERANCE
