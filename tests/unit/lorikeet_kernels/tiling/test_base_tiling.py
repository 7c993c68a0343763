"""Tiles of the base ops: shipped tables, rules, and what must not depend on the batch; no GPU."""

import itertools
import json

import pytest

from lorikeet_kernels.experts.fp8_specialized import STAYING_COLUMNS
from lorikeet_kernels.tiling.attention_tiles import MAX_SPLITS, select_decode, select_prefill
from lorikeet_kernels.tiling.expert_tiles import (
    ExpertTiles,
    MoeShape,
    MoeTiles,
    load_expert_table,
    parse_expert_table,
    select_experts,
)

H200 = "NVIDIA H200"
GPT_OSS = MoeShape("mxfp4", 2880, 2880, 32, 64)


def shapes(weights: str, pairs: int) -> MoeShape:
    """A shape that no table has."""
    return MoeShape(weights, 1000, 520, 13, pairs)  # pyright: ignore[reportArgumentType]


def check(tiles: ExpertTiles, weights: str, columns: int) -> None:
    """What the kernels ask of their tiles for matrices of so many columns."""
    if tiles.kernel == "specialized":
        assert weights == "fp8_block"
        assert (tiles.block_n, tiles.step, tiles.splits) == (128, 128, 1)
        assert tiles.block_rows in {128, 192}
        assert tiles.num_warps == tiles.block_rows // 16 + 4
        # an H200's shared memory less what barriers and results take; rows stay or pass through the ring
        rows = 2 * columns if columns <= STAYING_COLUMNS else tiles.stages * 128
        assert rows * tiles.block_rows + tiles.stages * 128 * 128 <= 202 << 10
        return
    assert tiles.block_rows & (tiles.block_rows - 1) == 0
    if weights == "mxfp4":
        assert tiles.block_n % (16 * tiles.num_warps) == 0
        assert tiles.kernel == "decode" or (tiles.step >= 2 and tiles.splits == 1)
        assert tiles.stages >= 2
    else:
        assert tiles.block_n & (tiles.block_n - 1) == 0
        assert tiles.step & (tiles.step - 1) == 0


def test_the_shipped_table_is_valid() -> None:
    """Every entry makes tiles that its kernel takes, and is what is selected at its own shape."""
    table = load_expert_table(H200)
    assert len(table) > 20
    for shape, tiles in table.items():
        check(tiles.gate_up, shape.weights, shape.hidden)
        check(tiles.down, shape.weights, shape.inner)
        assert select_experts(shape, H200) == tiles


def test_near_lengths_share_an_entry_and_other_sizes_do_not() -> None:
    """As many pairs an expert in a model of more experts find the same tiles; other widths the rule's."""
    wider = MoeShape("mxfp4", 2880, 2880, 128, 256)
    assert select_experts(wider, H200) == select_experts(GPT_OSS, H200)
    other = MoeShape("mxfp4", 2880, 2881, 32, 64)
    assert select_experts(other, H200) == select_experts(other, "some other card")


@pytest.mark.parametrize("weights", ["mxfp4", "bf16", "fp32", "fp8_block", "fp8_interleaved", "fp8_channel"])
def test_every_shape_gets_tiles_on_an_unknown_device(weights: str) -> None:
    """The rule covers one pair and a million."""
    for pairs in (1, 40, 200, 1000, 10_000, 1_000_000):
        shape = shapes(weights, pairs)
        tiles = select_experts(shape, "some other card")
        check(tiles.gate_up, weights, shape.hidden)
        check(tiles.down, weights, shape.inner)


def test_warps_specialize_for_whole_blocks_and_many_pairs_on_devices_that_can() -> None:
    """Not for few pairs, ragged blocks, rows in turn, channels, or a device where it was not measured."""

    def kernel(weights: str, inner: int, pairs: int, device: str = H200) -> str:
        shape = MoeShape(weights, 1024, inner, 8, pairs)  # pyright: ignore[reportArgumentType]
        tiles = select_experts(shape, device)
        check(tiles.gate_up, weights, shape.hidden)
        check(tiles.down, weights, inner)
        return tiles.down.kernel

    for pairs in (8 * 32, 8 * 100, 1 << 20):
        assert kernel("fp8_block", 384, pairs) == "specialized"
        assert kernel("fp8_block", 384, pairs, "some other card") == "prefill"
        assert kernel("fp8_block", 320, pairs) == "prefill"
        assert kernel("fp8_interleaved", 384, pairs) == "prefill"
        assert kernel("fp8_channel", 384, pairs) == "prefill"
    assert kernel("fp8_block", 384, 8 * 31) == "prefill"
    invariant = select_experts(MoeShape("fp8_block", 1024, 384, 8, 1 << 20), H200, batch_invariant=True)
    assert invariant.down.kernel == "decode"


@pytest.mark.parametrize(
    ("weights", "down"),
    [
        *itertools.permutations(("bf16", "fp8_block", "fp8_channel", "mxfp4"), 2),
        ("fp8_interleaved", "bf16"),
        ("fp32", "fp8_block"),
        ("fp8_block", "fp32"),
    ],
)
def test_each_gemm_of_experts_stored_in_two_ways_gets_tiles_of_its_own(weights: str, down: str) -> None:
    """One cut for both, no specialized warps, and no table's entry for experts stored in one way."""
    for pairs, inner in itertools.product((1, 64, 8 * 32, 8 * 100, 1 << 20), (768, 40)):
        shape = MoeShape(weights, 2048, inner, 8, pairs, down)  # pyright: ignore[reportArgumentType]
        tiles = select_experts(shape, H200)
        for part, stored, columns in ((tiles.gate_up, weights, 2048), (tiles.down, down, inner)):
            assert part.kernel != "specialized"
            check(part, stored, columns)
            itemsize = {"mxfp4": 0, "bf16": 2, "fp32": 4}.get(stored, 1)
            assert itemsize * part.stages * part.step * (part.block_rows + part.block_n) <= 227 << 10
        assert tiles == select_experts(shape, "some other card")


def test_batch_invariant_tiles_ignore_the_batch() -> None:
    """The same kernel and the same sums for any number of pairs."""
    chosen = {
        select_experts(MoeShape("mxfp4", 2880, 2880, 32, pairs), H200, batch_invariant=True)
        for pairs in (4, 64, 16384)
    }
    assert len(chosen) == 1
    assert chosen.pop().down.splits == 1


def test_mismatched_pairs_of_tiles_are_refused() -> None:
    """Two cuts, or a split before an activation."""
    narrow, wide = ExpertTiles("decode", 8, 64, 3, 4, 4), ExpertTiles("decode", 16, 64, 3, 4, 4)
    with pytest.raises(ValueError, match="one cut"):
        MoeTiles(narrow, wide)
    with pytest.raises(ValueError, match="whole sums"):
        MoeTiles(ExpertTiles("decode", 8, 64, 3, 4, 4, splits=2), narrow)


def test_a_table_from_text() -> None:
    """Optional fields have their defaults; an unknown one is an error."""
    tiles = {"kernel": "decode", "block_rows": 8, "block_n": 64, "step": 3, "stages": 4, "num_warps": 4}
    shape = {"weights": "mxfp4", "hidden": 64, "inner": 64, "num_experts": 2, "num_pairs": 4}
    entry = {"shape": shape, "gate_up": tiles, "down": tiles, "us": 1.0}
    assert parse_expert_table(json.dumps({"entries": [entry]}))[MoeShape(**shape)].down.splits == 1  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        parse_expert_table(json.dumps({"entries": [{**entry, "down": {**tiles, "color": 1}}]}))


def test_decode_splits_follow_the_shape_only_as_far_as_there_is_work() -> None:
    """More requests or shorter tables never split more, and a split has keys enough."""
    for requests, tokens in itertools.product((1, 8, 32, 256), (16, 2048, 32_768, 1 << 20)):
        tiles = select_decode(requests, 8, 64, tokens, 2)
        assert 1 <= tiles.splits <= MAX_SPLITS
        assert tiles.splits == 1 or tokens // tiles.splits >= 128
        assert select_decode(requests + 1, 8, 64, tokens, 2).splits <= tiles.splits
        assert select_decode(requests, 8, 64, tokens // 2, 2).splits <= tiles.splits


@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 64, 200])
def test_prefill_rows_hold_a_whole_group(dim: int, group: int) -> None:
    """At least one token with all its heads."""
    assert select_prefill(dim, group, 2).block_m >= group
    assert select_prefill(dim, group, 4).block_m >= group
