"""Small cases of the room `experts`: experts without pairs, one with nearly all, last blocks in part."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling
from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation_reference
from lorikeet_kernels.dense.quantize_rows import QuantizedRows, quantize_rows_reference
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks, cut_blocks, expert_blocks_reference
from lorikeet_kernels.experts.expert_gemm import expert_gemm
from lorikeet_kernels.experts.expert_linear import ExpertWeight, expert_linear_reference
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.fp8_ranged_down import BLOCK_ROWS, empty_marks, fp8_ranged_down
from lorikeet_kernels.experts.moe_sum import (
    SharedRows,
    moe_sum_parts_reference,
    moe_sum_reference,
    sum_pairs,
    sum_parts,
)
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.mxfp4_layout import Mxfp4DeviceWeight, lay_out_mxfp4
from lorikeet_kernels.experts.mxfp4_linear import mxfp4_linear
from lorikeet_kernels.experts.router_logits import router_logits, router_logits_reference
from lorikeet_kernels.experts.routing import RouterLora, route_rows, route_sigmoid_grouped, route_softmax
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.moe_groups import MoeGroups, make_moe_groups
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, moved, poisoned
from lorikeet_kernels.testing import (
    SiteShape,
    SlotSite,
    make_tables,
    random_experts,
    random_fp8_weight,
    random_mxfp4_weight,
)
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles, RangedTiles
from lorikeet_kernels.tiling.router_tiles import RouterTiles

EXPERTS, TOP_K = 5, 2
ACTIVATION = GatedActivation(1.702, 7.0, 1.0)
DeviceWeight = torch.Tensor | Mxfp4DeviceWeight | Fp8Weight


def _expert_blocks(dtype: torch.dtype) -> SmallProblem:
    """By one program and by several; experts that are no power of two, and without pairs."""
    del dtype
    generator = torch.Generator().manual_seed(0)
    several = random_experts(150, 13, 4, generator)
    all_ids = (random_experts(7, 5, 2, generator), several, torch.full_like(several, 12))
    made = [expert_blocks_reference(ids, 13, 16) for ids in all_ids]
    expected = tuple(part for cut in made for part in (cut.order, cut.blocks[:, :3]))

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        cuts = [cut_blocks(moved(ids, device), 13, 16) for ids in all_ids]
        return tuple(part for cut in cuts for part in (cut.order, cut.blocks[:, :3]))

    return SmallProblem(expected, launch, tolerance=0.0)


def _moe_sum(dtype: torch.dtype) -> SmallProblem:
    """Finished pairs with a delta, split parts with a bias, too; a last block of columns in part."""
    generator = torch.Generator().manual_seed(1)
    x, delta = torch.randn(2, 5, 3, 600, generator=generator).to(dtype)
    parts = torch.randn(4, 5, 3, 600, generator=generator)
    bias = torch.randn(7, 600, generator=generator).to(dtype)
    ids = torch.randint(0, 7, (5, 3), generator=generator, dtype=torch.int32)
    weights = torch.rand(5, 3, generator=generator)
    empty = torch.empty(5, 600, dtype=dtype)
    shared = SharedRows(
        torch.randn(5, 600, generator=generator).to(dtype), torch.randn(5, 600, generator=generator)
    )
    whole = moe_sum_parts_reference(parts, empty.clone(), ids, weights, bias=bias, delta=delta, shared=shared)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, added, split, b, experts, routed = moved((x, delta, parts, bias, ids, weights), device)
        out = sum_pairs(rows, poisoned(empty, device), delta=added)
        last = moved(shared, device)
        return out, sum_parts(
            split, poisoned(empty, device), experts, routed, bias=b, delta=added, shared=last
        )

    return SmallProblem((moe_sum_reference(x + delta), whole), launch)


def _multiply(
    x: torch.Tensor | QuantizedRows,
    weight: DeviceWeight,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    row_order: RowOrder | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the kernel of the weight's kind; activated where a row order is given."""
    activation = None if row_order is None else ACTIVATION
    if isinstance(weight, Fp8Weight):
        assert isinstance(x, QuantizedRows)
        return fp8_gemm(
            x, weight, blocks, out, tiles,
            bias=bias, topk_weights=topk_weights, activation=activation, row_order=row_order, delta=delta,
        )  # fmt: skip
    assert isinstance(x, torch.Tensor)
    if isinstance(weight, Mxfp4DeviceWeight):
        return mxfp4_linear(
            x, weight, blocks, out, tiles,
            bias=bias, topk_weights=topk_weights, activation=activation, delta=delta,
        )  # fmt: skip
    return expert_gemm(
        x, weight, blocks, out, tiles,
        bias=bias, topk_weights=topk_weights, activation=activation, row_order=row_order, delta=delta,
    )  # fmt: skip


def _on_device(weight: ExpertWeight, row_order: RowOrder | None) -> DeviceWeight:
    return lay_out_mxfp4(weight, pairing=row_order) if isinstance(weight, Mxfp4Weight) else weight


def _uneven_experts(num_tokens: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Of half of the tokens the first two; the last has no pairs."""
    ids = random_experts(num_tokens, num_experts - 1, TOP_K, generator)
    ids[num_tokens // 2 :, 0], ids[num_tokens // 2 :, 1] = 0, 1
    return ids


def _groups(ids: torch.Tensor, num_experts: int) -> MoeGroups:
    """The pairs by expert, without adapters."""
    segments = make_lora_segments(torch.full((len(ids),), -1, dtype=torch.int32), 1)
    return make_moe_groups(ids, segments, num_experts)


def _layer(
    gate_up: ExpertWeight,
    down: ExpertWeight,
    num_tokens: int,
    row_order: RowOrder,
    tiles: ExpertTiles,
    dtype: torch.dtype,
) -> SmallProblem:
    """gate_up with bias, activation and delta; down with bias and routed weights, whole and in two parts."""
    generator = torch.Generator().manual_seed(num_tokens)
    (experts, columns, hidden), inner = gate_up.shape, down.shape[2]
    ids = _uneven_experts(num_tokens, experts, generator)
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    act = torch.randn(num_tokens, TOP_K, inner, generator=generator).to(dtype)
    bias = torch.randn(experts, columns, generator=generator).to(dtype)
    down_bias = torch.randn(experts, down.shape[1], generator=generator).to(dtype)
    delta = torch.randn(num_tokens, TOP_K, columns, generator=generator).to(dtype)
    groups = _groups(ids, experts)
    rows = expert_linear_reference(x, gate_up, groups, torch.empty_like(delta), bias=bias)
    activated = gated_activation_reference(rows, ACTIVATION, row_order=row_order, delta=delta)
    pairs = torch.empty(num_tokens, TOP_K, down.shape[1], dtype=dtype)
    expert_linear_reference(act, down, groups, pairs, bias=down_bias, topk_weights=weights)
    splits = tiles.kernel == "decode"
    unsplit = torch.empty(num_tokens, TOP_K, down.shape[1])
    expert_linear_reference(act, down, groups, unsplit)
    up_rows, down_rows = (
        quantize_rows_reference(v, w.activations) if isinstance(w, Fp8Weight) else v
        for v, w in ((x, gate_up), (act, down))
    )
    laid = _on_device(gate_up, row_order), _on_device(down, None)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        up_x, down_x, routed, b, down_b, added = moved(
            (up_rows, down_rows, weights, bias, down_bias, delta), device
        )
        up, to_hidden = moved(laid, device)
        blocks = cut_blocks(moved(ids, device), experts, tiles.block_rows)
        first, second = poisoned(activated, device), poisoned(pairs, device)
        _multiply(up_x, up, blocks, first, tiles, bias=b, row_order=row_order, delta=added)
        _multiply(down_x, to_hidden, blocks, second, tiles, bias=down_b, topk_weights=routed)
        if not splits:
            return first, second
        parts = torch.full((2, *unsplit.shape), float("nan"), device=device)
        _multiply(down_x, to_hidden, blocks, parts, replace(tiles, splits=2))
        return first, second, parts.sum(0)

    expected = (activated, pairs, unsplit) if splits else (activated, pairs)
    return SmallProblem(expected, launch, tolerance=1e-2)


def _dense_layer(tokens: int, order: RowOrder, tiles: ExpertTiles, dtype: torch.dtype) -> SmallProblem:
    hidden, inner = 200, 40
    generator = torch.Generator().manual_seed(2)
    gate_up = (torch.randn(EXPERTS, 2 * inner, hidden, generator=generator) * hidden**-0.5).to(dtype)
    down = (torch.randn(EXPERTS, hidden, inner, generator=generator) * inner**-0.5).to(dtype)
    return _layer(gate_up, down, tokens, order, tiles, dtype)


def _mxfp4_layer(tokens: int, order: RowOrder, tiles: ExpertTiles, dtype: torch.dtype) -> SmallProblem:
    generator = torch.Generator().manual_seed(3)
    gate_up, down = (random_mxfp4_weight(EXPERTS, *shape, generator) for shape in ((128, 160), (40, 64)))
    return _layer(gate_up, down, tokens, order, tiles, dtype)


def _fp8_layer(
    sizes: tuple[int, int, int],
    kind: WeightScaling,
    order: RowOrder,
    tiles: ExpertTiles,
    dtype: torch.dtype,
) -> SmallProblem:
    tokens, hidden, inner = sizes
    generator = torch.Generator().manual_seed(4)
    is_interleaved = order == "interleaved"
    gate_up = random_fp8_weight(
        EXPERTS, (inner, inner), hidden, kind, generator, is_interleaved=is_interleaved
    )
    down = random_fp8_weight(EXPERTS, (hidden,), inner, kind, generator)
    return _layer(gate_up, down, tokens, order, tiles, dtype)


def _ranged_down(dtype: torch.dtype) -> SmallProblem:
    """More ranges than buffers, an expert of several blocks, tokens that fill no slot; rows added to them."""
    generator = torch.Generator().manual_seed(7)
    num_tokens, hidden, inner = 301, 1024, 256
    weight = random_fp8_weight(EXPERTS, (hidden,), inner, "block", generator)
    ids = _uneven_experts(num_tokens, EXPERTS, generator)
    routed = torch.rand(num_tokens, TOP_K, generator=generator)
    act = torch.randn(num_tokens, TOP_K, inner, generator=generator).to(dtype)
    added = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    rows = quantize_rows_reference(act, weight.activations)
    pairs = torch.empty(num_tokens, TOP_K, hidden, dtype=dtype)
    expert_linear_reference(act, weight, _groups(ids, EXPERTS), pairs, topk_weights=routed)
    expected = moe_sum_reference(pairs), moe_sum_reference(pairs, SharedRows(added))

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        x, matrix, weights, shared = moved((rows, weight, routed, added), device)
        blocks = cut_blocks(moved(ids, device), EXPERTS, BLOCK_ROWS)
        made: list[torch.Tensor] = []
        for tiles, other in ((RangedTiles(128, 4, 2, 4), None), (RangedTiles(256, 4, 1, 2), shared)):
            out, marks = poisoned(expected[0], device), empty_marks(matrix, tiles)
            made.append(fp8_ranged_down(x, matrix, blocks, out, tiles, weights, marks, shared=other))
        return tuple(made)

    return SmallProblem(expected, launch, tolerance=1e-2)


def _router(dtype: torch.dtype) -> SmallProblem:
    """A last part, and rows and experts, that fill no program; routing adds the parts up, rows of others."""
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(17, 200, generator=generator).to(dtype), torch.randn(40, 200, generator=generator)
    weight, bias = weight.to(dtype), torch.randn(40, generator=generator).to(dtype)
    tiles, source = RouterTiles(128, 4), torch.arange(16, -1, -1)
    parts = router_logits_reference(x, weight, bias, tiles)
    routed = route_softmax(parts, 3, renormalize=True, source_rows=source)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, matrix, b, at, given = moved((x, weight, bias, source, parts), device)
        made = router_logits(rows, matrix, b, tiles)
        return made.parts, *route_rows(given, None, at, None, 3, sigmoid=False, renormalize=True)

    return SmallProblem((parts.parts, *routed), launch)


def _route_adapted(dtype: torch.dtype) -> SmallProblem:
    """Groups and members that are no powers of two, adapters of several ranks and none, in float32."""
    del dtype
    generator = torch.Generator().manual_seed(6)
    x, logits = torch.randn(7, 301, generator=generator), torch.randn(7, 30, generator=generator)
    tables = make_tables(
        [SiteShape(301, 8), SiteShape(301, 30)],
        [[SlotSite(8), SlotSite(rank)] for rank in (8, 0, 33)],
        dtype=torch.float32,
    )
    slots = torch.tensor([0, -1, 2, 1, 2, 0, -1], dtype=torch.int32)
    lora = RouterLora(x, make_lora_segments(slots, 3), tables, 1)
    bias, source = torch.randn(30, generator=generator), torch.tensor([0, 1, 2, 3, 4, 1, 0])
    rule: dict[str, Any] = {"num_groups": 5, "top_k_groups": 3, "renormalize": True, "scale": 2.5}
    expected = route_sigmoid_grouped(logits, bias, 4, lora=lora, source_rows=source, **rule)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        given, rows, at, correction, adapters, slot = moved((logits, x, source, bias, tables, slots), device)
        added = RouterLora(rows, replace(lora.segments, token_slot=slot), adapters, 1)
        return route_rows(given, added, at, correction, 4, sigmoid=True, **rule)

    return SmallProblem(expected, launch, tolerance=1e-4)


_BLOCKS = ("experts.expert_blocks._place_kernel",)
_GEMM = (*_BLOCKS, "experts.expert_gemm._expert_gemm_kernel")
_FP8 = (*_BLOCKS, "experts.fp8_gemm._fp8_gemm_kernel")
_SPECIALIZED = (*_BLOCKS, "experts.fp8_specialized._fp8_specialized_kernel")
_FP4_DECODE = (*_BLOCKS, "experts.mxfp4_decode._mxfp4_decode_kernel")
_FP4_PREFILL = (*_BLOCKS, "experts.mxfp4_prefill._mxfp4_prefill_kernel")
_ROUTE = "experts.routing._route_kernel"
_FEW, _MANY = ExpertTiles("decode", 16, 64, 128, 3, 4), ExpertTiles("prefill", 128, 128, 128, 3, 8)
_RING = ExpertTiles("specialized", 192, 128, 128, 4, 16)
_FP4_FEW, _FP4_MANY = ExpertTiles("decode", 8, 64, 1, 4, 4), ExpertTiles("prefill", 64, 128, 2, 3, 8)
_WHOLE, _RAGGED = (256, 128), (200, 152)

CASES = (
    SmallCase("expert_blocks", ("experts.expert_blocks._count_experts_kernel", *_BLOCKS), _expert_blocks),
    SmallCase("moe_sum", ("experts.moe_sum._moe_sum_kernel",), _moe_sum),
    SmallCase("experts_decode", _GEMM, partial(_dense_layer, 9, "interleaved", _FEW)),
    SmallCase(
        "experts_prefill",
        _GEMM,
        partial(_dense_layer, 150, "concatenated", replace(_MANY, step=64)),
    ),
    SmallCase("mxfp4_decode", _FP4_DECODE, partial(_mxfp4_layer, 9, "interleaved", _FP4_FEW), needs_gpu=True),
    SmallCase(
        "mxfp4_prefill", _FP4_PREFILL, partial(_mxfp4_layer, 150, "concatenated", _FP4_MANY), needs_gpu=True
    ),
    SmallCase(
        "fp8_ragged", _FP8, partial(_fp8_layer, (9, *_RAGGED), "block", "interleaved", replace(_FEW, step=64))
    ),
    SmallCase("fp8_channels", _FP8, partial(_fp8_layer, (9, *_RAGGED), "channel", "concatenated", _FEW)),
    SmallCase("fp8_whole", _FP8, partial(_fp8_layer, (150, *_WHOLE), "block", "concatenated", _MANY)),
    SmallCase(
        "fp8_specialized",
        _SPECIALIZED,
        partial(_fp8_layer, (150, *_WHOLE), "block", "concatenated", _RING),
        needs_gpu=True,
    ),
    SmallCase(
        "fp8_ranged_down",
        (*_BLOCKS, "experts.fp8_ranged_down._fp8_ranged_down_kernel"),
        _ranged_down,
        needs_gpu=True,
    ),
    SmallCase("router", ("experts.router_logits._router_logits_kernel", _ROUTE), _router),
    SmallCase("route_adapted", (_ROUTE,), _route_adapted),
)
