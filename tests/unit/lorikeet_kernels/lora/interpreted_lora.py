"""Cases for the Triton interpreter, run by test_lora_interpreted.py in a process of their own.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. float32 and
float16 only: the interpreter multiplies bfloat16 as bit patterns.
"""

from functools import partial

import torch

from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.lora.group_blocks import group_pairs
from lorikeet_kernels.lora.grouped_expand import grouped_expand
from lorikeet_kernels.lora.grouped_shrink import grouped_shrink
from lorikeet_kernels.lora.lora_embedding import embed_rows, lora_embedding_reference
from lorikeet_kernels.lora.lora_linear import lora_linear_reference
from lorikeet_kernels.lora.lora_segments import LoraSegments, make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.lora.no_delta import NO_DELTA
from lorikeet_kernels.lora.output_lanes import gate_up_lanes, site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.lora.segment_lora import segment_lora
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling import ExpandTiles, PairTiles, ShrinkTiles

EXPERTS, TOP_K, HIDDEN, INNER = 3, 2, 45, 20
CPU = torch.device("cpu")
PAIR = PairTiles(16, 32, 32, 4)
WORKSPACE = LoraWorkspace(CPU)


def check_moe(dtype: torch.dtype, num_a: int, row_order: RowOrder, num_tokens: int) -> None:
    """Decode and grouped kernels against the reference, twice: the second run meets the other phase."""
    sites = [SiteShape(HIDDEN, 2 * INNER, EXPERTS), SiteShape(INNER, HIDDEN, EXPERTS)]
    tables = make_tables(sites, [[SlotSite(r, num_a), SlotSite(r)] for r in (8, 33, 0)], dtype=dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    act = torch.randn(num_tokens, TOP_K, INNER, generator=generator).to(dtype)
    segments = make_lora_segments(slots, 3)
    groups = make_moe_groups(ids, segments, EXPERTS)
    expected = torch.zeros(num_tokens, TOP_K, 2 * INNER, dtype=dtype)
    expected_down = torch.zeros(num_tokens, TOP_K, HIDDEN, dtype=dtype)
    moe_lora_gate_up(expected, x, ids, groups, segments, tables, 0, row_order)
    moe_lora_down(expected_down, act, ids, weights, groups, segments, tables, 1)
    lanes, down_lanes = gate_up_lanes(2 * INNER, row_order), site_lanes((HIDDEN,), (1,))
    interleaved = row_order == "interleaved"

    for _ in range(2):
        out, down = torch.zeros_like(expected), torch.zeros_like(expected_down)
        pair_lora(out, x, slots, ids, None, tables, (0,), lanes, PAIR, WORKSPACE, interleaved=interleaved)
        pair_lora(down, act, slots, ids, weights, tables, (1,), down_lanes, PAIR, WORKSPACE, x_per_pair=True)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert relative_error(down, expected_down) < TOLERANCE[dtype]
        delta = torch.full_like(expected, float("nan"))
        pair_lora(
            delta, x, slots, ids, None, tables, (0,), lanes, PAIR, WORKSPACE,
            interleaved=interleaved, accumulate=False,
        )  # fmt: skip
        check_delta(delta, out, slots)

    blocks = group_pairs(ids, slots, EXPERTS, 3, 16, WORKSPACE)
    assert torch.equal(blocks.starts[::4], groups.expert_indptr)
    out, down = torch.zeros_like(expected), torch.zeros_like(expected_down)
    h = torch.full((2, num_tokens * TOP_K, 1, 2, tables.max_rank), float("nan"))
    grouped_shrink(h, x, blocks, tables, (0, 0, 0), ShrinkTiles(32, 2, joined=2), x_div=TOP_K)
    grouped_expand(
        out, h, None, blocks, tables, (0, 0, 0), lanes, ExpandTiles(32, 2), interleaved=interleaved
    )
    delta = torch.full_like(expected, NO_DELTA)
    grouped_expand(
        delta, h, None, blocks, tables, (0, 0, 0), lanes, ExpandTiles(32, 2), interleaved=interleaved,
        accumulate=False,
    )  # fmt: skip
    check_delta(delta, out, slots)
    h = torch.full((2, num_tokens * TOP_K, 1, 1, tables.max_rank), float("nan"))
    grouped_shrink(h, act, blocks, tables, (1, 1, 1), ShrinkTiles(32, 2), x_div=1)
    grouped_expand(down, h, weights, blocks, tables, (1, 1, 1), down_lanes, ExpandTiles(32))
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(down, expected_down) < TOLERANCE[dtype]


def check_dense(num_tokens: int) -> None:
    """Three fused sites, one absent for a slot; one site of two slices; embedding rows."""
    widths = (48, 16, 24)
    slot_sites = [[SlotSite(8), SlotSite(0), SlotSite(16)], [SlotSite(3), SlotSite(24), SlotSite(16)]]
    tables: LoraTables = make_tables([SiteShape(HIDDEN, w) for w in widths], slot_sites, dtype=torch.float32)
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randint(-1, 2, (num_tokens,), generator=generator, dtype=torch.int32)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    compare_dense(x, slots, tables, widths, (1, 1, 1))
    two = make_tables([SiteShape(HIDDEN, 64)], [[SlotSite(5, num_a=2)], [SlotSite(16)]], dtype=torch.float32)
    compare_dense(x, slots, two, (64,), (2,))
    ids = torch.randint(0, HIDDEN, (num_tokens,), generator=generator, dtype=torch.int32)
    rows, want = torch.zeros(num_tokens, widths[0]), torch.zeros(num_tokens, widths[0])
    segments = make_lora_segments(slots, 2)
    lora_embedding_reference(want, ids, segments, tables, 0)
    embed_rows(rows, ids, segments, tables, 0)
    assert relative_error(rows, want) < TOLERANCE[torch.float32]


def compare_dense(
    x: torch.Tensor,
    slots: torch.Tensor,
    tables: LoraTables,
    widths: tuple[int, ...],
    slices: tuple[int, ...],
) -> None:
    """All three ways against the reference; those with phases twice."""
    sites, lanes = tuple(range(len(widths))), site_lanes(widths, slices)
    shape = (x.shape[0], sum(widths))
    segments: LoraSegments = make_lora_segments(slots, 2)
    base = torch.ones(shape)
    expected = base.clone()
    lora_linear_reference(expected, x, segments, tables, sites, widths, slices)
    blocks = group_pairs(None, slots, 1, 2, 4, WORKSPACE)  # a slot's tokens fill several blocks
    for _ in range(2):
        out = base.clone()
        pair_lora(out, x, slots, None, None, tables, sites, lanes, PAIR, WORKSPACE)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
        out = base.clone()
        segment_lora(out, x, blocks, tables, sites, lanes, PAIR, WORKSPACE)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
        assert torch.equal(out[slots < 0], base[slots < 0])
    for launch in (
        partial(pair_lora, token_slot=slots, topk_ids=None, topk_weights=None),
        partial(segment_lora, blocks=blocks),
    ):
        delta, added = torch.full(shape, float("nan")), torch.zeros(shape)
        rest = {"tables": tables, "sites": sites, "lanes": lanes, "tiles": PAIR, "workspace": WORKSPACE}
        launch(delta, x, **rest, accumulate=False)
        launch(added, x, **rest)
        check_delta(delta, added, slots)
    out = base.clone()
    padded = (*sites, *sites[:1] * (3 - len(sites)))
    h = torch.full((2, x.shape[0], len(sites), max(slices), tables.max_rank), float("nan"))
    grouped_shrink(h, x, blocks, tables, padded, ShrinkTiles(32, 2, joined=4), x_div=1)
    grouped_expand(out, h, None, blocks, tables, padded, lanes, ExpandTiles(32, 2, num_stages=2))
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def check_delta(delta: torch.Tensor, added: torch.Tensor, slots: torch.Tensor) -> None:
    """A delta stored over NaN is what is added to zeros; rows without an adapter change no sign of a zero."""
    assert torch.equal(delta, added)
    without = delta[slots < 0]
    assert torch.equal(without, torch.zeros_like(without))
    assert without.signbit().all()


if __name__ == "__main__":
    check_moe(torch.float32, 1, "interleaved", 5)
    check_moe(torch.float32, 2, "interleaved", 3)
    check_moe(torch.float16, 2, "concatenated", 3)
    check_dense(13)
    check_dense(1)
