"""What down and the sum in one launch by ranges take, and how they refuse the rest."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling
from lorikeet_kernels.dense.quantize_rows import QuantizedRows, quantize_rows_reference
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks, expert_blocks
from lorikeet_kernels.experts.fp8_ranged_down import (
    BLOCK_ROWS,
    can_range_down,
    empty_marks,
    fp8_ranged_down,
)
from lorikeet_kernels.testing import random_experts, random_fp8_weight
from lorikeet_kernels.tiling.expert_tiles import (
    ExpertTiles,
    MoeShape,
    MoeTiles,
    RangedTiles,
    parse_expert_table,
)

TILES = RangedTiles(128, 6, 2, 4)
EXPERTS, HIDDEN, INNER = 4, 512, 256


def matrix(kind: WeightScaling = "block", hidden: int = HIDDEN, inner: int = INNER) -> Fp8Weight:
    """A down projection."""
    return random_fp8_weight(EXPERTS, (hidden,), inner, kind, torch.Generator().manual_seed(0))


def test_which_projections_it_takes() -> None:
    """Whole blocks of few columns, whole tokens a slot, a sum after its range, 16 bits."""

    def takes(
        weight: Fp8Weight, top_k: int, tiles: RangedTiles = TILES, rows: int = BLOCK_ROWS, tokens: int = 300
    ) -> bool:
        return can_range_down(weight, tokens, top_k, rows, torch.bfloat16, tiles)

    weight = matrix()
    assert takes(weight, 8)
    assert takes(weight, 2)
    assert takes(matrix(inner=128), 8)
    assert takes(weight, 8, replace(TILES, columns=512))
    assert takes(matrix(inner=128), 8, replace(TILES, stages=9))
    assert not takes(weight, 6)
    assert not takes(weight, 0)
    assert not takes(weight, 8, rows=128)
    assert not takes(weight, 8, replace(TILES, columns=192))
    assert not takes(weight, 8, replace(TILES, columns=1024))
    assert not takes(weight, 8, replace(TILES, stages=1))
    assert not takes(weight, 8, replace(TILES, stages=7))
    assert not takes(weight, 8, replace(TILES, lag=0))
    assert not takes(weight, 8, replace(TILES, buffers=2))
    assert not takes(weight, 8, tokens=2**21)
    assert not takes(matrix(inner=384), 8)
    assert not takes(matrix(inner=200), 8)
    assert not takes(matrix(hidden=640), 8, replace(TILES, columns=256))
    assert not takes(matrix(hidden=0), 8)
    assert not takes(matrix("channel"), 8)
    assert not can_range_down(weight, 300, 8, BLOCK_ROWS, torch.float32, TILES)


def arguments(
    num_tokens: int = 9,
) -> tuple[QuantizedRows, Fp8Weight, ExpertBlocks, torch.Tensor, torch.Tensor]:
    """Rows, matrix, blocks, where the sums go, routed weights."""
    generator = torch.Generator().manual_seed(1)
    weight = matrix()
    ids = random_experts(num_tokens, EXPERTS, 2, generator)
    act = torch.randn(num_tokens, 2, INNER, generator=generator).bfloat16()
    out = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
    rows = quantize_rows_reference(act, weight.activations)
    return rows, weight, expert_blocks(ids, EXPERTS, BLOCK_ROWS), out, torch.rand(num_tokens, 2)


def test_refusals() -> None:
    """Each names what it got; nothing is launched."""
    rows, weight, blocks, out, routed = arguments()
    marks = empty_marks(weight, TILES)

    def refused(match: str, **changed: object) -> None:
        given: dict[str, object] = {
            "x": rows, "weight": weight, "blocks": blocks, "out": out, "tiles": TILES, "topk_weights": routed,
            "marks": marks,
        }  # fmt: skip
        with pytest.raises(ValueError, match=match):
            fp8_ranged_down(**(given | changed))  # pyright: ignore[reportArgumentType]

    refused("blocks of 64", blocks=replace(blocks, block_rows=64))
    refused("buffers=2", tiles=replace(TILES, buffers=2))
    refused("marks torch.int32", marks=marks[1:])
    refused("marks torch.int64", marks=marks.long())
    refused(r"marks .* strides \(2,\)", marks=marks.repeat_interleave(2)[::2])
    refused(r"\(8, 2, 256\)", x=QuantizedRows(rows.values[1:], rows.scales))
    refused(r"\(17, 2\)", x=QuantizedRows(rows.values, rows.scales[1:]))
    refused("torch.uint8", x=QuantizedRows(rows.values.view(torch.uint8), rows.scales))
    refused("torch.float64", topk_weights=routed.double())
    refused(r"strides \(1, 9\)", topk_weights=routed.T.contiguous().T)
    refused(r"\(9, 256\)", out=out[:, :256])
    refused(r"\(8, 512\)", shared=out[1:])
    refused("torch.float32 ", shared=out.float())
    refused("for torch.float32", out=out.float())
    across = weight.values.transpose(1, 2).contiguous().transpose(1, 2)
    refused(r"strides \(131072, 1, 512\)", weight=replace(weight, values=across))
    across = weight.scales.transpose(1, 2).contiguous().transpose(1, 2)
    refused(r"strides \(8, 1, 4\)", weight=replace(weight, scales=across))
    refused("torch.int64", blocks=replace(blocks, blocks=blocks.blocks.long()))
    refused(r"strides \(1, ", blocks=replace(blocks, blocks=blocks.blocks.T.contiguous().T))
    refused("5 experts", blocks=replace(blocks, num_experts=5))


def test_no_tokens_are_nothing_to_do() -> None:
    """And launch nothing."""
    rows, weight, blocks, out, routed = arguments(0)
    assert fp8_ranged_down(rows, weight, blocks, out, TILES, routed, empty_marks(weight, TILES)) is out


def test_tables_may_hold_them() -> None:
    """With the tiles that serve where adapters come between."""
    shape = MoeShape("fp8_block", 7168, 256, 256, 32768)
    tiles = ExpertTiles("specialized", BLOCK_ROWS, 128, 128, 4, 16)
    plain = {"shape": asdict(shape), "gate_up": asdict(tiles), "down": asdict(tiles)}
    with_ranges = plain | {"ranged": asdict(TILES)}
    for entry, ranged in ((plain, None), (with_ranges, TILES)):
        table = parse_expert_table(json.dumps({"entries": [entry]}))
        assert table == {shape: MoeTiles(tiles, tiles, ranged)}
