"""What bench_base times of FP8 beside whole layers: their launches one by one, dense products by blocks."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from lorikeet_kernels.benchmarking.bench_problem import MoeModel
from lorikeet_kernels.benchmarking.expert_projections import expert_projection, fp8_weight
from lorikeet_kernels.benchmarking.graph_timing import call_each
from lorikeet_kernels.benchmarking.latent_points import Point
from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_linear import torch_product
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import SILU
from lorikeet_kernels.dense.quantize_rows import QuantizedRows, quantize_rows
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks, expert_blocks
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.fp8_ranged_down import can_range_down, empty_marks, fp8_ranged_down
from lorikeet_kernels.experts.moe_sum import sum_pairs
from lorikeet_kernels.experts.routing import route_softmax
from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.dense_tiles import DenseTiles, select_dense
from lorikeet_kernels.tiling.expert_tiles import MoeShape, MoeTiles, RangedTiles, select_experts

BF16 = torch.bfloat16
Calls = list[Callable[[], object]]
_DENSE_TILES = (
    DenseTiles(128, 128, 128, 3, 8),
    DenseTiles(128, 128, 128, 4, 8),
    DenseTiles(64, 128, 128, 4, 4),
    DenseTiles(128, 64, 128, 4, 4),
)
_NEVER_REUSED = 1000  # buffers: rows go to memory, as those of two launches
_RANGED_TILES = (
    RangedTiles(128, 6, 1, 4),
    RangedTiles(128, 6, 2, 4),
    RangedTiles(128, 6, 2, 5),
    RangedTiles(128, 6, 3, 5),
    RangedTiles(128, 6, 2, _NEVER_REUSED),
    RangedTiles(256, 6, 1, 3),
    RangedTiles(256, 6, 2, 4),
)
_TOLERANCE = 1e-2


def layer_part_points(model: MoeModel, num_tokens: int) -> Iterator[Point]:
    """Each launch of a layer with block scales by itself, with what it must read and write."""
    gate_ups = [expert_projection(model, "fp8_block", is_gate_up=True) for _ in range(2)]
    downs = [expert_projection(model, "fp8_block", is_gate_up=False) for _ in range(2)]
    logits = torch.randn(num_tokens, model.num_experts, device="cuda").to(BF16)
    x = torch.randn(num_tokens, model.hidden, device="cuda").to(BF16)
    weights, ids, tiles, blocks = _routed(model, logits)
    pairs, touched = ids.numel(), len(set(ids.flatten().tolist()))
    scaling = _fp8(gate_ups[0].weight).activations
    act = x.new_empty((*ids.shape, model.inner))
    parts, out = x.new_empty((*ids.shape, model.hidden)), torch.empty_like(x)
    rows = quantize_rows(x, scaling)
    project = partial(fp8_gemm, activation=SILU, row_order=model.row_order)
    calls_up: Calls = [
        partial(project, rows, _fp8(one.weight), blocks, act, tiles.gate_up) for one in gate_ups
    ]
    calls_up[0]()
    act_rows = quantize_rows(act, scaling)
    calls_down: Calls = [
        partial(fp8_gemm, act_rows, _fp8(one.weight), blocks, parts, tiles.down, topk_weights=weights)
        for one in downs
    ]
    calls_down[0]()
    hidden, inner = model.hidden, model.inner
    flop = 2.0 * pairs * hidden * inner
    matrix = touched * hidden * inner
    again = 8
    launches: tuple[tuple[str, Sequence[Callable[[], object]], int, float], ...] = (
        ("routing", [partial(route_softmax, logits, model.top_k, renormalize=True)] * again, 0, 0.0),
        ("cut", [partial(expert_blocks, ids, model.num_experts, blocks.block_rows)] * again, 0, 0.0),
        ("quantise x", [partial(quantize_rows, x, scaling)] * again, 3 * x.numel(), 0.0),
        ("gate_up", calls_up, 2 * matrix + x.numel() + 2 * act.numel(), 2 * flop),
        ("quantise act", [partial(quantize_rows, act, scaling)] * again, 3 * act.numel(), 0.0),
        ("down", calls_down, matrix + act.numel() + 2 * parts.numel(), flop),
        ("sum", [partial(sum_pairs, parts, out)] * again, 2 * parts.numel() + 2 * out.numel(), 0.0),
    )
    own, rows_of_block = tiles.ranged, tiles.down.block_rows
    down = _fp8(downs[0].weight)
    if own is not None and can_range_down(down, num_tokens, model.top_k, rows_of_block, BF16, own):
        ranged = partial(_ranged, act_rows, blocks=blocks, out=out, weights=weights)
        calls_both: Calls = [partial(ranged, _fp8(one.weight), own) for one in downs]
        launches += (("down and sum, one launch", calls_both, matrix + act.numel() + 2 * out.numel(), flop),)
    for name, calls, num_bytes, flops in launches:
        yield Point(f"fp8 {model.name} T={num_tokens} {name}", list(calls), num_bytes, flops)


def _routed(
    model: MoeModel, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, MoeTiles, ExpertBlocks]:
    """Routed weights and experts of a batch, a layer's tiles for it, and its pairs cut into blocks."""
    weights, ids = route_softmax(logits, model.top_k, renormalize=True)
    shape = MoeShape("fp8_block", model.hidden, model.inner, model.num_experts, ids.numel())
    tiles = select_experts(shape, device_name(logits))
    return weights, ids, tiles, expert_blocks(ids, model.num_experts, tiles.gate_up.block_rows)


def _ranged(
    rows: QuantizedRows,
    weight: Fp8Weight,
    own: RangedTiles,
    *,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    fp8_ranged_down(rows, weight, blocks, out, own, weights, empty_marks(weight, own))


def block_downs(model: MoeModel) -> list[Fp8Weight]:
    """Two, which take turns: neither is in the L2 when its turn comes."""
    return [_fp8(expert_projection(model, "fp8_block", is_gate_up=False).weight) for _ in range(2)]


def down_and_sum_ways(
    model: MoeModel, downs: Sequence[Fp8Weight], num_tokens: int
) -> tuple[dict[str, Calls], Callable[[], list[str]], float]:
    """Down and the top-k sum, as two launches and as one by ranges; which are wrong; bytes that must move.

    Each range's rows of pairs are meant to stay in the L2: they count as no bytes.
    """
    logits = torch.randn(num_tokens, model.num_experts, device="cuda").to(BF16)
    weights, ids, tiles, blocks = _routed(model, logits)
    act = torch.randn((*ids.shape, model.inner), device="cuda").to(BF16)
    rows = quantize_rows(act, downs[0].activations)
    pairs = act.new_empty((*ids.shape, model.hidden))
    out, other = (act.new_empty((num_tokens, model.hidden)) for _ in range(2))

    def apart(weight: Fp8Weight) -> None:
        fp8_gemm(rows, weight, blocks, pairs, tiles.down, topk_weights=weights)
        sum_pairs(pairs, out)

    ranged = partial(_ranged, rows, blocks=blocks, out=other, weights=weights)
    compile_ahead(
        lambda: call_each(
            (partial(apart, downs[0]), *(partial(ranged, downs[0], own) for own in _RANGED_TILES))
        ),
        os.cpu_count() or 1,
    )
    names = {
        own: f"{own.columns} columns, lag {own.lag}, "
        f"{min(own.buffers, model.hidden // own.columns)} buffers, {own.stages} stages"
        for own in _RANGED_TILES
    }

    def wrong() -> list[str]:
        apart(downs[0])
        found: list[str] = []
        for own, name in names.items():
            other.fill_(float("nan"))
            ranged(downs[0], own)
            if not torch.equal(other, out):
                found.append(name)
        return found

    ways: dict[str, Calls] = {"apart": [partial(apart, weight) for weight in downs]}
    ways |= {name: [partial(ranged, weight, own) for weight in downs] for own, name in names.items()}
    touched = len(set(ids.flatten().tolist()))
    return ways, wrong, touched * model.hidden * model.inner + act.numel() + 2.0 * out.numel()


def block_product_ways(num_tokens: int, rows: int, columns: int) -> dict[str, Calls]:
    """A dense projection by block scales, its input's quantising included: own tiles, and torch's product."""
    weights = [fp8_weight((rows, columns), "block") for _ in range(4)]
    x = torch.randn(num_tokens, columns, device="cuda").to(BF16)
    out = x.new_empty((num_tokens, rows))

    def own(weight: Fp8Weight, tiles: DenseTiles) -> torch.Tensor:
        return dense_fp8_gemm(quantize_rows(x, weight.activations), weight, out, tiles, None)

    def by_torch(weight: Fp8Weight) -> torch.Tensor:
        return torch_product(quantize_rows(x, weight.activations, by_group=True), weight, None)

    rule = select_dense(num_tokens, rows, columns, "block")
    tried = list(dict.fromkeys((rule, *_DENSE_TILES)))
    compile_ahead(lambda: call_each(partial(own, weights[0], tiles) for tiles in tried), os.cpu_count() or 1)
    ways: dict[str, Calls] = {
        f"own {t.block_m}x{t.block_n}, {t.stages} stages{' (rule)' if t == rule else ''}": [
            partial(own, weight, t) for weight in weights
        ]
        for t in tried
    }
    try:
        other = by_torch(weights[0]).float()
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"torch takes no blocks at {num_tokens} x {rows} x {columns}: {error}\n")
        return ways
    expected = own(weights[0], rule).float()
    difference = float((other - expected).norm() / expected.norm())
    mark = f" WRONG by {difference:.2g}" if not difference < _TOLERANCE else ""
    ways[f"torch{mark}"] = [partial(by_torch, weight) for weight in weights]
    return ways


def _fp8(weight: object) -> Fp8Weight:
    assert isinstance(weight, Fp8Weight)
    return weight
