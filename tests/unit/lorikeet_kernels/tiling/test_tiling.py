"""Tiles: choice, shipped tables, tuning plans; no GPU."""

import pytest

from lorikeet_kernels.benchmarking.tune_plan import (
    expand_candidates,
    is_done,
    pair_candidates,
    points_of,
    points_of_trace,
    segment_candidates,
    shrink_candidates,
    to_json,
)
from lorikeet_kernels.tiling import (
    ExpandTiles,
    OpShape,
    PairTiles,
    RegisterTiles,
    ShrinkTiles,
    is_alone,
    is_segmented,
    is_ungrouped,
    select_block_m,
    select_expand,
    select_pair,
    select_segment,
    select_shrink,
)
from lorikeet_kernels.tiling.tile_table import TileEntry, TileTable, file_of, load, parse

H200 = "NVIDIA H200"
GATE_UP = OpShape("gate_up", 2880, 5760, 16, 64)


def test_shipped_table_round_trips_and_makes_valid_tiles() -> None:
    """Every shipped entry becomes the tiles of its stage, and text -> table -> text keeps all."""
    table = load(H200)
    assert len(table.entries) > 100
    assert parse(to_json(table)) == parse(file_of(H200).read_text())
    kinds = {"pair": PairTiles, "segment": PairTiles, "shrink": ShrinkTiles, "expand": ExpandTiles}
    for entry in table.entries:
        in_registers = entry.stage == "segment" and "rows" not in entry.tiles
        assert (RegisterTiles if in_registers else kinds[entry.stage])(**entry.tiles)
        assert entry.us > 0


def test_measured_entry_wins_and_scales_to_near_lengths() -> None:
    """At a measured shape the table decides; four times as many pairs still use it; other widths do not."""
    entry = load(H200).nearest("pair", GATE_UP)
    assert entry is not None
    assert entry.shape == GATE_UP
    assert select_pair(GATE_UP, H200) == PairTiles(**entry.tiles, slot_scan=True)
    far = OpShape("gate_up", 2881, 5760, 16, 64)
    assert load(H200).nearest("pair", far) is None


def test_of_two_projections_as_wide_each_gets_its_own_expand() -> None:
    """An expand never sees the input's width, but the entry measured for the very projection wins a tie."""
    table = load(H200)
    for in_features in (2880, 8192):
        shape = OpShape("linear", in_features, 5120, 16, 4096)
        entry = table.nearest("expand", shape, 32)
        assert entry is not None
        assert entry.shape == shape


@pytest.mark.parametrize("rank", [8, 16, 64, 256])
@pytest.mark.parametrize("pairs", [1, 64, 4096, 100_000])
def test_every_shape_gets_tiles_on_an_unknown_device(rank: int, pairs: int) -> None:
    """The rule yields powers of two that fit a thread's registers for any shape."""
    for in_features, out_features in ((64, 96), (2880, 5760), (14336, 4096)):
        shape = OpShape("down", in_features, out_features, rank, pairs)
        tiles = select_pair(shape, "some other card")
        assert tiles.block_n & (tiles.block_n - 1) == 0
        assert tiles.block_n * max(16, rank) // (32 * tiles.num_warps) <= 128
        block_m = select_block_m(pairs, 8, 4)
        assert select_shrink(shape, block_m, "some other card").splits >= 1
        assert select_segment(shape, "some other card").block_n >= 64
        assert select_expand(shape, block_m, "some other card").span >= 1


def test_path_follows_how_many_pairs_share_weights() -> None:
    """Small batches are never grouped; larger ones once more than two pairs read the same weights."""
    assert is_ungrouped(256, 1, 1)
    assert is_ungrouped(1024, 128, 8)
    assert not is_ungrouped(1024, 32, 8)
    assert not is_ungrouped(4096, 4096, 8)


def test_dense_tokens_are_blocked_once_they_share_adapters() -> None:
    """Few tokens, or few a slot, go by themselves; more in one launch of blocks; many grouped."""
    assert is_alone(16, 1)
    assert is_alone(32, 32)
    assert not is_alone(32, 8)
    assert not is_alone(1024, 1024)
    assert is_segmented(32, 10, 16)
    assert not is_segmented(32, 10, 64)
    assert not is_segmented(4096, 136, 16)


def test_candidates_fit() -> None:
    """Each stage has candidates, and none asks a thread for more than it can hold."""
    pairs = list(pair_candidates(GATE_UP))
    assert len(pairs) > 10
    assert all(t.rows * t.block_k // (32 * t.num_warps) <= 128 for t in pairs)
    assert list(shrink_candidates(GATE_UP, 32))
    assert list(segment_candidates(GATE_UP))
    assert all(t.block_n >= 16 for t in expand_candidates(GATE_UP, 32))


def test_trace_orders_points_by_traffic() -> None:
    """The most frequent (tokens, rank) comes first, and shares add up to one."""
    points = points_of_trace('{"tokens": {"1": 10, "64": 90}, "ranks": {"16": 3, "8": 1}}')
    assert (points[0].num_tokens, points[0].rank) == (64, 16)
    assert sum(point.weight for point in points) == pytest.approx(1.0)
    assert len(points_of([1, 2], [8])) == 2
    with pytest.raises(ValueError, match="ranks"):
        points_of_trace('{"tokens": {"1": 1}}')


def test_interrupted_run_knows_what_is_done() -> None:
    """Only the very same stage, shape and block counts as measured."""
    table = TileTable("card", "", (TileEntry("pair", GATE_UP, 0, {"rows": 16}, 1.0),))
    assert is_done(table, "pair", GATE_UP, 0)
    assert not is_done(table, "shrink", GATE_UP, 16)
