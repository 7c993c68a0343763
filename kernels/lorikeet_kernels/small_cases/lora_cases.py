"""Small cases of the room `lora`: ranks 0, 8, 33 and 64, slot -1, sites that a slot lacks, odd widths."""

from dataclasses import replace
from functools import partial

import torch

from lorikeet_kernels.dense.few_heads_linear import few_heads_linear
from lorikeet_kernels.dense.fp8_linear import fp8_linear_reference
from lorikeet_kernels.dense.head_linear import head_linear_reference
from lorikeet_kernels.dense.linear import linear_reference
from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_blocks import expert_blocks_reference
from lorikeet_kernels.experts.expert_linear import expert_linear_reference
from lorikeet_kernels.experts.fp8_gemm_lora import fp8_gemm_lora
from lorikeet_kernels.lora.few_heads_lora import few_heads_lora
from lorikeet_kernels.lora.few_rows_lora import few_rows_lora
from lorikeet_kernels.lora.fp8_few_rows_lora import fp8_few_rows_lora
from lorikeet_kernels.lora.group_blocks import group_pairs
from lorikeet_kernels.lora.grouped_expand import grouped_expand
from lorikeet_kernels.lora.grouped_shrink import grouped_shrink
from lorikeet_kernels.lora.head_lora import HeadRows, add_head_lora, head_lora_reference
from lorikeet_kernels.lora.joined_delta import JoinedSites
from lorikeet_kernels.lora.lora_embedding import embed_rows, lora_embedding_reference
from lorikeet_kernels.lora.lora_linear import lora_linear_reference
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.lora.no_delta import NO_DELTA
from lorikeet_kernels.lora.output_lanes import gate_up_lanes, site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.lora.register_segments import register_segments
from lorikeet_kernels.lora.segment_lora import segment_lora
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, moved, poisoned
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, random_experts, random_fp8_weight
from lorikeet_kernels.tiling import ExpandTiles, PairTiles, RegisterTiles, ShrinkTiles
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles
from lorikeet_kernels.tiling.few_heads_tiles import FewHeadsTiles
from lorikeet_kernels.tiling.few_rows_tiles import FewRowsTiles

EXPERTS, TOP_K, HIDDEN, INNER = 3, 2, 301, 40
PAIR = PairTiles(32, 256, 128, 4)
WIDTHS, SITES = (192, 64, 48), (0, 1, 2)
# what three slots have at three sites side by side
WIDE_RANKS = ((8, 0, 64), (33, 16, 16), (0, 0, 0))
NARROW_RANKS = ((8, 0, 16), (3, 16, 24), (0, 0, 0))
CPU = torch.device("cpu")


def _tables(ranks: tuple[tuple[int, ...], ...], in_features: int, dtype: torch.dtype) -> LoraTables:
    slots = [[SlotSite(rank) for rank in row] for row in ranks]
    return make_tables([SiteShape(in_features, width) for width in WIDTHS], slots, dtype=dtype)


def _slots(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 3, (count,), generator=generator, dtype=torch.int32)


def _dense(
    way: str, num_tokens: int, in_features: int, dtype: torch.dtype, *, accumulate: bool = True
) -> SmallProblem:
    """q, k and v by one of the kernels; twice, so that what one launch leaves is what the next one meets."""
    tables = _tables(WIDE_RANKS if way in ("pair", "grouped") else NARROW_RANKS, in_features, dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    slots = _slots(num_tokens, generator)
    x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
    base = torch.randn(num_tokens, sum(WIDTHS), generator=generator).to(
        dtype if accumulate else torch.float32
    )
    expected = base.clone()
    lora_linear_reference(
        expected, x, make_lora_segments(slots, 3), tables, SITES, WIDTHS, accumulate=accumulate
    )

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, at, adapters = moved((x, slots, tables), device)
        workspace, lanes = LoraWorkspace(device), site_lanes(WIDTHS, (1, 1, 1))
        outs = tuple(moved(base, device) for _ in range(2))
        blocks = None if way == "pair" else group_pairs(None, at, 1, 3, 16, workspace)
        for out in outs:
            if blocks is None:
                pair_lora(
                    out, rows, at, None, None, adapters, SITES, lanes, PAIR, workspace, accumulate=accumulate
                )
            elif way == "segment":
                segment_lora(
                    out, rows, blocks, adapters, SITES, lanes, PAIR, workspace, accumulate=accumulate
                )
            elif way == "register":
                tiles = RegisterTiles(256, 64, 2)
                register_segments(
                    out, rows, blocks, adapters, SITES, lanes, tiles, workspace, accumulate=accumulate
                )
            else:
                h = torch.full((2, num_tokens, 3, 1, adapters.max_rank), float("nan"), device=device)
                shrink = ShrinkTiles(128, 2, joined=2)
                grouped_shrink(h, rows, blocks, adapters, SITES, shrink, x_div=1)
                grouped_expand(out, h, None, blocks, adapters, SITES, lanes, ExpandTiles(128, 2, 4, 2))
        return outs

    return SmallProblem((expected, expected), launch)


def _joined(kind: str, dtype: torch.dtype) -> SmallProblem:
    """A projection with q, k and v's adapters in one launch; twice, for both phases."""
    num_tokens, in_features = 5, 304
    tables = _tables(NARROW_RANKS, in_features, dtype)
    generator = torch.Generator().manual_seed(9)
    slots = _slots(num_tokens, generator)
    x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
    weight = (torch.randn(sum(WIDTHS), in_features, generator=generator) * in_features**-0.5).to(dtype)
    bias = torch.randn(sum(WIDTHS), generator=generator).to(dtype)
    added = torch.empty(num_tokens, sum(WIDTHS))
    segments = make_lora_segments(slots, 3)
    lora_linear_reference(added, x, segments, tables, SITES, WIDTHS, accumulate=False)
    packed = random_fp8_weight(1, WIDTHS, in_features, "block", generator).expert(0)
    quantized = quantize_rows_reference(x, packed.activations)
    projected = fp8_linear_reference(x, packed, bias) if kind == "fp8" else linear_reference(x, weight, bias)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, matrix, offset, of_sites, of_rows = moved(
            (x, weight, bias, tables, segments.token_slot), device
        )
        values, e4m3 = moved((quantized, packed), device)
        batch = make_lora_segments(of_rows, 3, LoraWorkspace(device))
        adapters = JoinedSites(batch, of_sites, SITES, WIDTHS, (1, 1, 1), PAIR)
        made = [(poisoned(projected, device), poisoned(added, device)) for _ in range(2)]
        for out, delta in made:
            if kind == "fp8":
                fp8_few_rows_lora(values, e4m3, offset, rows, out, delta, FewRowsTiles(2, 2), adapters)
            else:
                few_rows_lora(rows, matrix, offset, out, delta, FewRowsTiles(2, 2), adapters)
        return tuple(part for both in made for part in both)

    return SmallProblem((projected, added) * 2, launch)


def _moe(way: str, num_tokens: int, num_a: int, row_order: RowOrder, dtype: torch.dtype) -> SmallProblem:
    """gate_up and down, by pairs or grouped; experts and slots without pairs."""
    sites = [SiteShape(HIDDEN, 2 * INNER, EXPERTS), SiteShape(INNER, HIDDEN, EXPERTS)]
    tables = make_tables(sites, [[SlotSite(r, num_a), SlotSite(r)] for r in (8, 33, 0)], dtype=dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    slots, ids = _slots(num_tokens, generator), random_experts(num_tokens, EXPERTS, TOP_K, generator)
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    act = torch.randn(num_tokens, TOP_K, INNER, generator=generator).to(dtype)
    bases = (
        torch.randn(num_tokens, TOP_K, 2 * INNER, generator=generator).to(dtype),
        torch.randn(num_tokens, TOP_K, HIDDEN, generator=generator).to(dtype),
    )
    segments = make_lora_segments(slots, 3)
    groups = make_moe_groups(ids, segments, EXPERTS)
    expected = tuple(base.clone() for base in bases)
    moe_lora_gate_up(expected[0], x, ids, groups, segments, tables, 0, row_order)
    moe_lora_down(expected[1], act, ids, weights, groups, segments, tables, 1)
    interleaved, lanes = row_order == "interleaved", gate_up_lanes(2 * INNER, row_order)
    down_lanes = site_lanes((HIDDEN,), (1,))

    def by_pairs(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, inner, at, experts, routed, adapters = moved((x, act, slots, ids, weights, tables), device)
        out, down = moved(bases, device)
        workspace = LoraWorkspace(device)
        pair_lora(
            out, rows, at, experts, None, adapters, (0,), lanes, PAIR, workspace, interleaved=interleaved
        )
        pair_lora(
            down, inner, at, experts, routed, adapters, (1,), down_lanes, PAIR, workspace, x_per_pair=True
        )
        return out, down

    def grouped(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, inner, at, experts, routed, adapters = moved((x, act, slots, ids, weights, tables), device)
        out, down = moved(bases, device)
        blocks = group_pairs(experts, at, EXPERTS, 3, 16, LoraWorkspace(device))
        first, second = (adapters.padded_sites((site,)) for site in (0, 1))
        shape = (2, num_tokens * TOP_K, 1, 2, adapters.max_rank)
        h = torch.full(shape, float("nan"), device=device)
        grouped_shrink(h, rows, blocks, adapters, first, ShrinkTiles(128, 2, joined=2), x_div=TOP_K)
        grouped_expand(
            out, h, None, blocks, adapters, first, lanes, ExpandTiles(128), interleaved=interleaved
        )
        h = torch.full((1, *shape[1:3], 1, shape[4]), float("nan"), device=device)
        grouped_shrink(h, inner, blocks, adapters, second, ShrinkTiles(128), x_div=1)
        grouped_expand(down, h, routed, blocks, adapters, second, down_lanes, ExpandTiles(128, 2, 4, 2))
        return out, down

    return SmallProblem(expected, by_pairs if way == "pair" else grouped)


def _fp8_joined_down(dtype: torch.dtype) -> SmallProblem:
    """FP8 experts' down with its adapters in one launch; twice, for both phases."""
    num_tokens, generator = 3, torch.Generator().manual_seed(8)
    sites = [SiteShape(HIDDEN, 2 * INNER, EXPERTS), SiteShape(INNER, HIDDEN, EXPERTS)]
    tables = make_tables(sites, [[SlotSite(r), SlotSite(r)] for r in (8, 24, 0)], dtype=dtype)
    slots, ids = _slots(num_tokens, generator), random_experts(num_tokens, EXPERTS, TOP_K, generator)
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    act = torch.randn(num_tokens, TOP_K, INNER, generator=generator).to(dtype)
    weight = random_fp8_weight(EXPERTS, (HIDDEN,), INNER, "block", generator)
    quantized = quantize_rows_reference(act, weight.activations)
    bias = torch.randn(EXPERTS, HIDDEN, generator=generator).to(dtype)
    segments = make_lora_segments(slots, 3)
    groups = make_moe_groups(ids, segments, EXPERTS)
    projected = torch.empty(num_tokens, TOP_K, HIDDEN, dtype=dtype)
    expert_linear_reference(act, weight, groups, projected, bias=bias, topk_weights=weights)
    added = torch.full_like(projected, NO_DELTA)
    moe_lora_down(added, act, ids, weights, groups, segments, tables, 1)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, matrix, offset, experts, routed = moved((act, weight, bias, ids, weights), device)
        of_rows, of_sites, values = moved((slots, tables, quantized), device)
        batch = make_lora_segments(of_rows, 3, LoraWorkspace(device))
        blocks = moved(expert_blocks_reference(ids, EXPERTS, 16), device)
        adapters = JoinedSites(batch, of_sites, (1,), (HIDDEN,), (1,), PAIR, TOP_K)
        made = [(poisoned(projected, device), poisoned(added, device)) for _ in range(2)]
        tiles = ExpertTiles("decode", 16, 64, 32, 2, 4)
        for out, delta in made:
            rest = (blocks, out, delta, experts, routed, tiles, adapters)
            fp8_gemm_lora(values, rows, matrix, *rest, bias=offset)
        return tuple(part for both in made for part in both)

    return SmallProblem((projected, added) * 2, launch)


def _group_blocks(dtype: torch.dtype) -> SmallProblem:
    """More pairs than a program counts, more groups than the scan takes at once, most of them empty."""
    del dtype
    experts, num_slots = 150, 8
    generator = torch.Generator().manual_seed(5)
    slots = torch.randint(-1, num_slots, (170,), generator=generator, dtype=torch.int32)
    ids = random_experts(170, experts, TOP_K, generator)
    group = ids.flatten() * (num_slots + 1) + (slots + 1).repeat_interleave(TOP_K)
    ordered = group.sort().values
    bounds = torch.arange(experts * (num_slots + 1) + 1, dtype=torch.int32)
    starts = torch.searchsorted(ordered, bounds, out_int32=True)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        pairs, at = moved((ids, slots), device)
        blocks = group_pairs(pairs, at, experts, num_slots, 16, LoraWorkspace(device))
        order = blocks.order.cpu()  # of a group in any order; anything where kernels are only compiled
        return blocks.starts, group[order.clamp(0, ids.numel() - 1).long()], order.sort().values

    return SmallProblem((starts, ordered, torch.arange(340, dtype=torch.int32)), launch, tolerance=0.0)


def _head_lora(num_tokens: int, *, by_blocks: bool, dtype: torch.dtype) -> SmallProblem:
    """Both directions, ragged sizes, heads in wider rows."""
    heads, plain, value, latent = 3, 20, 17, 140
    stride = plain + value
    ranks = [[SlotSite(rank)] for rank in (8, 33, 0)]
    tables = make_tables([SiteShape(latent, heads * stride)], ranks, dtype=dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    slots = _slots(num_tokens, generator)
    ways = (
        (True, plain, latent, HeadRows(stride, 0, plain)),
        (False, latent, value, HeadRows(stride, plain, value)),
    )
    xs = tuple(
        torch.randn(num_tokens, heads, size + 5, generator=generator).to(dtype) for _, size, _, _ in ways
    )
    bases = tuple(
        torch.randn(num_tokens, heads, width + 2, generator=generator).to(dtype) for _, _, width, _ in ways
    )
    expected, alone = tuple(base.clone() for base in bases), make_lora_segments(slots, 3)
    for (down, size, width, rows), x, out in zip(ways, xs, expected, strict=True):
        head_lora_reference(out[..., :width], x[..., :size], alone, tables, 0, rows, down=down)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        at, adapters, inputs, outs = moved((slots, tables, xs, bases), device)
        workspace = LoraWorkspace(device)
        blocks = group_pairs(None, at, 1, 3, 16, workspace) if by_blocks else None
        segments = replace(alone, token_slot=at, workspace=workspace, blocks=blocks)
        for (down, size, width, rows), x, out in zip(ways, inputs, outs, strict=True):
            add_head_lora(out[..., :width], x[..., :size], segments, adapters, 0, rows, down=down)
        return outs

    return SmallProblem(expected, launch)


def _few_heads(dtype: torch.dtype) -> SmallProblem:
    """Both directions without adapters and with them in the same launch; columns and rows that fill none."""
    heads, plain, value, latent, num_tokens = 3, 24, 20, 40, 5
    stride = plain + value
    tables = make_tables(
        [SiteShape(latent, heads * stride)], [[SlotSite(rank)] for rank in (8, 30, 0)], dtype=dtype
    )
    generator = torch.Generator().manual_seed(11)
    slots = _slots(num_tokens, generator)
    up = (torch.randn(heads, stride, latent, generator=generator) * latent**-0.5).to(dtype)
    xs = tuple(
        torch.randn(num_tokens, heads, size + 8, generator=generator).to(dtype) for size in (plain, latent)
    )

    def ways(weight: torch.Tensor) -> tuple[tuple[bool, HeadRows, torch.Tensor], ...]:
        return (
            (True, HeadRows(stride, 0, plain), weight[:, :plain]),
            (False, HeadRows(stride, plain, value), weight[:, plain:].transpose(1, 2)),
        )

    expected: list[torch.Tensor] = []
    for (down, rows, weight), x in zip(ways(up), xs, strict=True):
        x = x[..., : weight.shape[1]]  # noqa: PLW2901 (a view of it)
        base = head_linear_reference(x, weight, x.new_empty(num_tokens, heads, weight.shape[2]))
        expected += [base, base.clone()]
        head_lora_reference(expected[-1], x, make_lora_segments(slots, 3), tables, 0, rows, down=down)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        at, adapters, matrix, inputs = moved((slots, tables, up, xs), device)
        segments = make_lora_segments(at, 3, LoraWorkspace(device))
        outs = tuple(poisoned(out, device) for out in expected)
        tiles = FewHeadsTiles(16)
        for i, ((down, rows, weight), x) in enumerate(zip(ways(matrix), inputs, strict=True)):
            own = x[..., : weight.shape[1]]
            few_heads_linear(own, weight, outs[2 * i], tiles)
            few_heads_lora(own, weight, outs[2 * i + 1], segments, adapters, 0, rows, tiles, down=down)
        return outs

    return SmallProblem(tuple(expected), launch)


def _embedding(dtype: torch.dtype) -> SmallProblem:
    """The last row of a vocabulary, widths that fill no program."""
    vocab, width = 45, 203
    ranks = [[SlotSite(rank)] for rank in (64, 33, 0)]
    tables = make_tables([SiteShape(vocab, width)], ranks, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    slots = _slots(13, generator)
    ids = torch.randint(0, vocab, (13,), generator=generator, dtype=torch.int32)
    ids[slots >= 0] = vocab - 1
    base = torch.randn(13, width, generator=generator).to(dtype)
    expected, segments = base.clone(), make_lora_segments(slots, 3)
    lora_embedding_reference(expected, ids, segments, tables, 0)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        out, tokens, at, adapters = moved((base, ids, slots, tables), device)
        embed_rows(out, tokens, replace(segments, token_slot=at), adapters, 0)
        return (out,)

    return SmallProblem((expected,), launch)


_BLOCKS = tuple(f"lora.group_blocks._{name}_kernel" for name in ("count", "scan", "scatter"))
_PAIR = ("lora.pair_lora._pair_lora_kernel",)
_GROUPED = (
    *_BLOCKS,
    "lora.grouped_shrink._grouped_shrink_kernel",
    "lora.grouped_expand._grouped_expand_kernel",
)
_SEGMENT = (*_BLOCKS, "lora.segment_lora._segment_lora_kernel")
_REGISTER = (*_BLOCKS, "lora.register_segments._register_segments_kernel")
_HEAD = ("lora.head_lora._head_lora_kernel",)

CASES = (
    SmallCase("group_blocks", _BLOCKS, _group_blocks),
    SmallCase("dense_pair", _PAIR, partial(_dense, "pair", 5, HIDDEN)),
    SmallCase("dense_pair_delta", _PAIR, partial(_dense, "pair", 5, HIDDEN, accumulate=False)),
    SmallCase("dense_joined", ("lora.few_rows_lora._few_rows_lora_kernel",), partial(_joined, "plain")),
    SmallCase("fp8_joined", ("lora.fp8_few_rows_lora._fp8_few_rows_lora_kernel",), partial(_joined, "fp8")),
    SmallCase("dense_segment", _SEGMENT, partial(_dense, "segment", 60, HIDDEN)),
    SmallCase("dense_segment_delta", _SEGMENT, partial(_dense, "segment", 60, HIDDEN, accumulate=False)),
    SmallCase("dense_register", _REGISTER, partial(_dense, "register", 60, HIDDEN), needs_gpu=True),
    SmallCase(
        "dense_register_delta",
        _REGISTER,
        partial(_dense, "register", 60, HIDDEN, accumulate=False),
        needs_gpu=True,
    ),
    # rows of a multiple of 16 bytes are fetched ahead
    SmallCase("dense_register_fetch", _REGISTER, partial(_dense, "register", 20, 1000), needs_gpu=True),
    SmallCase("dense_grouped", _GROUPED, partial(_dense, "grouped", 70, HIDDEN)),
    SmallCase("moe_pair_two_a", _PAIR, partial(_moe, "pair", 5, 2, "interleaved")),
    SmallCase("moe_pair_halves", _PAIR, partial(_moe, "pair", 5, 2, "concatenated")),
    SmallCase("fp8_down_joined", ("experts.fp8_gemm_lora._fp8_gemm_lora_kernel",), _fp8_joined_down),
    SmallCase("moe_grouped_two_a", _GROUPED, partial(_moe, "grouped", 40, 2, "interleaved")),
    SmallCase("moe_grouped_one_a", _GROUPED, partial(_moe, "grouped", 40, 1, "concatenated")),
    SmallCase("head_by_token", _HEAD, lambda dtype: _head_lora(5, by_blocks=False, dtype=dtype)),
    SmallCase(
        "head_by_blocks", (*_BLOCKS, *_HEAD), lambda dtype: _head_lora(40, by_blocks=True, dtype=dtype)
    ),
    SmallCase(
        "few_heads",
        ("dense.few_heads_linear._few_heads_kernel", "lora.few_heads_lora._few_heads_lora_kernel"),
        _few_heads,
    ),
    SmallCase("embedding", ("lora.lora_embedding._lora_embedding_kernel",), _embedding),
)
