"""Cases of the FP8 ops for the Triton interpreter, run by test_fp8_interpreted.py, a process for each.

The interpreter does not round to e4m3 as devices do, so what is quantised here has its scale a power of two
and values that e4m3 has; its products of e4m3 are exact.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.runtime import interpreter

from lorikeet_kernels.dense.fp8_few_rows import fp8_few_rows
from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_linear import fp8_linear_reference
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling
from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation_reference
from lorikeet_kernels.dense.quantize_rows import (
    ActivationScaling,
    launch_quantize,
    quantize_rows_reference,
)
from lorikeet_kernels.experts.expert_blocks import expert_blocks_reference
from lorikeet_kernels.experts.expert_linear import expert_linear_reference
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.fp8_gemm_lora import fp8_gemm_lora
from lorikeet_kernels.experts.moe_experts import ExpertProjection, moe_experts
from lorikeet_kernels.experts.moe_sum import moe_sum_parts_reference
from lorikeet_kernels.lora.joined_delta import JoinedSites
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.output_lanes import site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.testing import (
    TOLERANCE,
    SiteShape,
    SlotSite,
    make_tables,
    random_fp8_weight,
    relative_error,
)
from lorikeet_kernels.tiling import PairTiles
from lorikeet_kernels.tiling.dense_tiles import DenseTiles
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

_patch_tensor = interpreter._patch_lang_tensor
ACTIVATION = GatedActivation(1.702, 1.5, 1.0)
TOKEN, GROUPS = ActivationScaling("token"), ActivationScaling("group")
GENERATOR = torch.Generator().manual_seed(1)


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def representable(rows: int, columns: int, group: int) -> torch.Tensor:
    """Values of e4m3 times a power of two for each group, whose largest is 448 times it; a group of zeros."""
    codes = torch.randint(0, 127, (rows, columns), dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() * (1 - 2 * torch.randint(0, 2, (rows, columns)))
    for first in range(0, columns, group):
        values[:, first] = 448.0
        values[:, first : first + group] *= 2.0 ** torch.randint(-5, 3, (rows, 1))
    values[0, :group] = 0.0
    return values


def check_quantize_rows() -> None:
    """Every scaling, ragged groups, a bound that cuts, more rows than a program has, whole and by slices."""
    for rows, columns in ((1, 128), (37, 200), (5, 513), (1, 4300), (2, 4300), (50, 4300)):
        for dtype in (torch.float32, torch.float16):
            cases = (
                (representable(rows, columns, 128), GROUPS),
                (representable(rows, columns, columns), TOKEN),
                (representable(rows, columns, columns), ActivationScaling("token", bound=448.0)),
                (representable(rows, columns, columns), ActivationScaling("static", torch.tensor([2.0**-5]))),
            )
            for x, scaling in cases:
                by_group = scaling is GROUPS and rows == 37
                got = launch_quantize(x.to(dtype), scaling, by_group=by_group)
                expected = quantize_rows_reference(x.to(dtype), scaling)
                assert got.scales.shape[0] == got.values.shape[0] == (40 if by_group else rows)
                assert torch.equal(got.scales[:rows], expected.scales)
                assert torch.equal(got.values[:rows].float(), expected.values.float())


def check_gemm(kind: WeightScaling, hidden: int, inner: int, tiles: ExpertTiles) -> None:
    """gate_up in both row orders with bias, limit and delta; down with routed weights, whole and split."""
    experts, top_k, tokens = 4, 2, 9
    dtype = torch.float32
    x = torch.randn(tokens, hidden)
    bias, down_bias = torch.randn(experts, 2 * inner), torch.randn(experts, hidden)
    ids = torch.rand(tokens, experts).topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(tokens, top_k)
    none = torch.full((tokens,), -1, dtype=torch.int32)
    groups = make_moe_groups(ids, make_lora_segments(none, 1), experts)
    blocks = expert_blocks_reference(ids, experts, tiles.block_rows)
    for row_order in ("interleaved", "concatenated"):
        gate_up = random_fp8_weight(
            experts, (inner, inner), hidden, kind, GENERATOR, is_interleaved=row_order == "interleaved"
        )
        v = torch.empty(tokens, top_k, 2 * inner)
        expert_linear_reference(x, gate_up, groups, v, bias=bias)
        rows = quantize_rows_reference(x, gate_up.activations)
        for added in (None, torch.randn_like(v)):
            act = torch.full((tokens, top_k, inner), float("nan"))
            fp8_gemm(
                rows, gate_up, blocks, act, tiles,
                bias=bias, activation=ACTIVATION, row_order=row_order, delta=added,
            )  # fmt: skip
            whole = v if added is None else v + added
            expected = gated_activation_reference(whole, ACTIVATION, row_order=row_order)
            assert relative_error(act, expected) < 4 * TOLERANCE[dtype]
    down = random_fp8_weight(experts, (hidden,), inner, kind, GENERATOR)
    act = torch.randn(tokens, top_k, inner)
    rows = quantize_rows_reference(act, down.activations)
    expected = torch.empty(tokens, top_k, hidden)
    expert_linear_reference(act, down, groups, expected, bias=down_bias, topk_weights=weights)
    out = torch.full_like(expected, float("nan"))
    fp8_gemm(rows, down, blocks, out, tiles, bias=down_bias, topk_weights=weights)
    assert relative_error(out, expected) < 4 * TOLERANCE[dtype]
    parts = torch.full((2, *out.shape), float("nan"))
    fp8_gemm(rows, down, blocks, parts, replace(tiles, splits=2))
    whole = torch.empty(tokens, hidden)
    moe_sum_parts_reference(parts, whole, ids, weights, bias=down_bias)
    assert relative_error(whole, expected.sum(1)) < 6 * TOLERANCE[dtype]


def check_channels() -> None:
    """Ragged widths, a step that does not divide them."""
    check_gemm("channel", 40, 24, ExpertTiles("decode", 16, 32, 16, 1, 4))


def check_ragged_blocks() -> None:
    """Blocks that end within the matrix, gate's rows no multiple of 128; a step of half a block."""
    check_gemm("block", 200, 152, ExpertTiles("decode", 16, 64, 64, 1, 4))


def check_whole_blocks() -> None:
    """Scales that all rows of a program share; more rows than a block of pairs."""
    check_gemm("block", 256, 128, ExpertTiles("prefill", 16, 128, 128, 1, 4))
    check_gemm("block", 128, 256, ExpertTiles("prefill", 16, 64, 128, 1, 4))


def check_gemm_lora() -> None:
    """The bits of the GEMM and of down's delta by themselves: all scales, whole and split."""
    experts, top_k, inner, hidden, dtype = 5, 2, 80, 56, torch.float16
    sites = [SiteShape(hidden, 2 * inner, experts), SiteShape(inner, hidden, experts)]
    tables = make_tables(sites, [[SlotSite(r), SlotSite(r)] for r in (8, 0, 24)], dtype=dtype)
    bias = torch.randn(experts, hidden).to(dtype)
    workspace, apart = LoraWorkspace(torch.device("cpu")), LoraWorkspace(torch.device("cpu"))
    tiles, pair = ExpertTiles("decode", 16, 32, 16, 2, 4), PairTiles(16, 32, 32, 2)
    for slots, kind in (([2], "block"), ([0, -1, 1, 0], "channel")):
        down = random_fp8_weight(experts, (hidden,), inner, kind, GENERATOR)
        shape = (len(slots), top_k, hidden)
        act, weights = torch.randn(*shape[:2], inner).to(dtype), torch.rand(shape[:2])
        rows = quantize_rows_reference(act, down.activations)
        segments = replace(make_lora_segments(torch.tensor(slots, dtype=torch.int32), 3), workspace=workspace)
        adapters = JoinedSites(segments, tables, (1,), (hidden,), (1,), pair, top_k)
        ids = torch.rand(len(slots), experts).topk(top_k, dim=1).indices.to(torch.int32)
        blocks = expert_blocks_reference(ids, experts, 16)
        for splits, added in ((1, None), (1, bias), (2, None)):
            used, routed = replace(tiles, splits=splits), weights if splits == 1 else None
            parts = torch.full((2, splits, *shape), float("nan"))
            expected, out = parts if splits > 1 else parts[:, 0].to(dtype)
            fp8_gemm(rows, down, blocks, expected, used, bias=added, topk_weights=routed)
            delta, got = torch.full((2, *shape), float("nan"), dtype=dtype)
            pair_lora(
                delta, act, segments.token_slot, ids, weights, tables, (1,), site_lanes((hidden,), (1,)),
                pair, apart, x_per_pair=True, accumulate=False,
            )  # fmt: skip
            fp8_gemm_lora(rows, act, down, blocks, out, got, ids, weights, used, adapters, bias=added)
            assert torch.equal(out, expected)
            assert torch.equal(got.view(torch.int16), delta.view(torch.int16))


def check_dense() -> None:
    """Rows beyond a tile, ragged widths, scales by channel, by shared and by ragged blocks; a bias."""
    for heights, columns in (((128, 128), 256), ((72, 40, 40), 200)):
        for kind in ("channel", "block"):
            stacked = random_fp8_weight(1, heights, columns, kind, GENERATOR).expert(0)
            bias = torch.randn(stacked.shape[0])
            for rows, tiles in (
                (70, DenseTiles(64, 64, 128, 1, 4)),
                (3, DenseTiles(16, 64, 64, 1, 4, splits=3, is_matrix_first=True)),
                (5, DenseTiles(8, 64, 128, 1, 4, is_matrix_first=True)),
                (19, DenseTiles(16, 64, 128, 1, 4, is_matrix_first=True)),
                (33, DenseTiles(32, 64, 64, 1, 4, splits=2, is_matrix_first=True)),
            ):
                x = torch.randn(rows, columns)
                for b in (None, bias):
                    got = torch.full((rows, stacked.shape[0]), float("nan"))
                    dense_fp8_gemm(quantize_rows_reference(x, stacked.activations), stacked, got, tiles, b)
                    assert relative_error(got, fp8_linear_reference(x, stacked, b)) < 2e-6


def check_few_rows() -> None:
    """Lanes' own multiplications: rows that fill no program, columns no chunk; all scales; a bias."""
    for heights, columns in (((128, 128), 2048), ((72, 40, 45), 208)):
        for kind in ("channel", "block"):
            stacked = random_fp8_weight(1, heights, columns, kind, GENERATOR).expert(0)
            bias = torch.randn(stacked.shape[0])
            for rows, tiles in ((1, FewRowsTiles(8, 2)), (3, FewRowsTiles(2, 1)), (8, FewRowsTiles(4, 1))):
                x = torch.randn(rows, columns)
                for b in (None, bias):
                    got = torch.full((rows, stacked.shape[0]), float("nan"))
                    fp8_few_rows(quantize_rows_reference(x, stacked.activations), stacked, got, tiles, b)
                    assert relative_error(got, fp8_linear_reference(x, stacked, b)) < 2e-6


def check_mixed_experts() -> None:
    """A layer with one projection in FP8, the other plain; one token, whose pairs' blocks FP8 needs cut."""
    experts, top_k, hidden, inner = 4, 2, 128, 128
    weights_of: list[tuple[torch.Tensor | Fp8Weight, torch.Tensor | Fp8Weight]] = [
        (
            torch.randn(experts, 2 * inner, hidden),
            random_fp8_weight(experts, (hidden,), inner, "block", GENERATOR),
        ),
        (
            random_fp8_weight(experts, (inner, inner), hidden, "block", GENERATOR),
            torch.randn(experts, hidden, inner),
        ),
    ]
    for up, down in weights_of:
        for tokens in (1, 9):
            x = torch.randn(tokens, hidden)
            ids = torch.rand(tokens, experts).topk(top_k, dim=1).indices.to(torch.int32)
            weights = torch.rand(tokens, top_k)
            none = torch.full((tokens,), -1, dtype=torch.int32)
            groups = make_moe_groups(ids, make_lora_segments(none, 1), experts)
            v = torch.empty(tokens, top_k, 2 * inner)
            expert_linear_reference(x, up, groups, v)
            act = gated_activation_reference(v, ACTIVATION, row_order="concatenated")
            pairs = torch.empty(tokens, top_k, hidden)
            expert_linear_reference(act, down, groups, pairs, topk_weights=weights)
            projections = ExpertProjection(up, None, "concatenated"), ExpertProjection(down, None, None)
            got = moe_experts(x, weights, ids, *projections, ACTIVATION)
            assert relative_error(got, pairs.sum(1)) < 2e-2  # what is quantised again may round the other way


CASES: dict[str, Callable[[], None]] = {
    "quantize_rows": check_quantize_rows,
    "channels": check_channels,
    "ragged_blocks": check_ragged_blocks,
    "whole_blocks": check_whole_blocks,
    "mixed_experts": check_mixed_experts,
    "gemm_lora": check_gemm_lora,
    "dense": check_dense,
    "few_rows": check_few_rows,
}


if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
