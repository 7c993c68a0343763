"""The dense projection of few rows: its kernel in the interpreter, what it refuses, the choice of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorikeet_kernels.dense.few_rows_linear import few_rows_linear, takes
from lorikeet_kernels.tiling import few_rows_tiles
from lorikeet_kernels.tiling.few_rows_tiles import (
    MAX_FEW_ROWS,
    MAX_LANE_ROWS,
    MULTIPROCESSORS,
    FewRowsEntry,
    FewRowsShape,
    FewRowsTiles,
    load_few_rows_table,
    num_chunks,
    parse_few_rows_table,
    rule,
    select_few_rows,
)
from lorikeet_kernels.tune_few_rows import candidates

H200 = "NVIDIA H200"
BF16 = torch.bfloat16
SIZES = (
    (5120, 2880),
    (2880, 4096),
    (5120, 2048),
    (2048, 4096),
    (10240, 8192),
    (8192, 28672),
    (40, 64),
    (3, 8),
)


@pytest.mark.parametrize("name", ["interpreted_few_rows.py", "interpreted_few_rows_products.py"])
def test_kernels_under_the_interpreter(name: str) -> None:
    """See these files for what they cover."""
    script = Path(__file__).with_name(name)
    stand_ins = str(script.parent.parent / "lora")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), stand_ins)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_the_kernel_does_not_read() -> None:
    """Other dtypes, strides, odd sizes, addresses between 16 bytes; and outputs of another shape."""
    x, weight = torch.zeros(2, 16, dtype=BF16), torch.zeros(5, 16, dtype=BF16)
    assert takes(x, weight)
    assert not takes(x.float(), weight.float())
    assert not takes(x.half(), weight)
    assert not takes(torch.zeros(16, 2, dtype=BF16).T, weight)
    assert not takes(torch.zeros(2, 18, dtype=BF16), torch.zeros(5, 18, dtype=BF16))
    assert not takes(torch.zeros(33, dtype=BF16)[1:].view(2, 16), weight)
    tiles = FewRowsTiles(1, 1)
    out = torch.zeros(2, 5, dtype=BF16)
    with pytest.raises(ValueError, match="few rows: x"):
        few_rows_linear(x, weight, None, out[:, :4], tiles)
    with pytest.raises(ValueError, match="few rows: x"):
        few_rows_linear(torch.zeros(2, 24, dtype=BF16), weight, None, out, tiles)
    for bias in (torch.zeros(4, dtype=BF16), torch.zeros(10, dtype=BF16)[::2]):
        with pytest.raises(ValueError, match="for 5 outputs"):
            few_rows_linear(x, weight, bias, out, tiles)
    with pytest.raises(ValueError, match="take 16 rows"):
        few_rows_linear(
            torch.zeros(MAX_FEW_ROWS + 1, 16), weight, None, torch.zeros(17, 5), replace(tiles, products=True)
        )
    with pytest.raises(ValueError, match="take 8 rows"):
        few_rows_linear(torch.zeros(9, 16, dtype=BF16), weight, None, torch.zeros(9, 5, dtype=BF16), tiles)
    with pytest.raises(ValueError, match="16 bits"):
        few_rows_linear(x.float(), weight.float(), None, torch.zeros(2, 5), tiles)


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_the_rule_keeps_registers_and_multiprocessors_busy(out_features: int, in_features: int) -> None:
    """A power of two of rows; no more loads a lane than its registers hold; programs for the whole card."""
    tiles = rule(FewRowsShape(1, out_features, in_features))
    loads = tiles.rows * num_chunks(in_features, tiles.num_warps)
    assert tiles.rows in (1, 2, 4)
    assert loads <= 16
    if out_features >= 4 * MULTIPROCESSORS:
        assert out_features / tiles.rows >= 4 * MULTIPROCESSORS or tiles.rows == 1


@pytest.mark.parametrize(("out_features", "in_features"), SIZES[:6])
def test_a_search_begins_with_the_rule(out_features: int, in_features: int) -> None:
    """And tries few enough others, none twice."""
    for num_rows in (1, 4, 8, 16):
        shape = FewRowsShape(num_rows, out_features, in_features)
        tried = candidates(shape)
        assert tried[0] == rule(shape)
        assert len(set(tried)) == len(tried) <= 14


def test_the_choice_follows_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """None without a table or where cuBLAS was as fast; a near shape as its neighbour, by the rule."""
    assert select_few_rows(1, 5120, 2880, "some other card") is None
    tiles = FewRowsTiles(2, 4)
    fast, slow, equal = (FewRowsEntry(tiles, us, 10.0) for us in (8.0, 11.0, 9.8))
    table = {
        FewRowsShape(1, 5120, 2880): fast,
        FewRowsShape(2, 5120, 2880): slow,
        FewRowsShape(4, 5120, 2880): equal,
        FewRowsShape(4, 2880, 5120): fast,
        FewRowsShape(16, 5120, 2880): fast,
        FewRowsShape(1, 256, 64): slow,
    }
    monkeypatch.setattr(few_rows_tiles, "load_few_rows_table", lambda device: table)
    choose = select_few_rows.__wrapped__
    assert choose(1, 5120, 2880, H200) == tiles
    assert choose(2, 5120, 2880, H200) is None
    assert choose(3, 5120, 2880, H200) is None
    assert choose(4, 5120, 2880, H200) is None
    assert choose(1, 2880, 4096, H200) == rule(FewRowsShape(1, 2880, 4096))
    assert choose(4, 2560, 5120, H200) == rule(FewRowsShape(4, 2560, 5120))
    assert choose(4, 5120, 2560, H200) is None
    assert choose(16, 5120, 2880, H200) == tiles
    assert choose(16, 5120, 2560, H200) is None
    assert choose(1, 300, 64, H200) is None
    assert choose(1, 100_000, 2880, H200) is None


@pytest.mark.parametrize("num_rows", [2, 4, 8, 16])
def test_what_an_h200_takes_from_cublas(num_rows: int) -> None:
    """Long sums into few columns (o); of wide ones (qkv) two rows only."""
    for out_features, in_features in ((5120, 2880), (5120, 2048)):
        assert (select_few_rows(num_rows, out_features, in_features, H200) is not None) == (num_rows == 2)
    assert select_few_rows(num_rows, 2048, 4096, H200) is not None
    assert (select_few_rows(num_rows, 2880, 4096, H200) is not None) == (num_rows < 16)


def test_a_table_reads_back_and_the_shipped_one_is_valid() -> None:
    """Entries as the tuning tool prints them; every shipped one names tiles that the kernel takes."""
    entry = {
        "shape": {"num_rows": 1, "out_features": 8, "in_features": 16},
        "tiles": {"rows": 4, "num_warps": 2, "max_registers": None},
        "us": 1.5,
        "cublas_us": 2.0,
    }
    table = parse_few_rows_table(json.dumps({"entries": [entry]}))
    assert table == {FewRowsShape(1, 8, 16): FewRowsEntry(FewRowsTiles(4, 2), 1.5, 2.0)}
    with pytest.raises(TypeError):
        parse_few_rows_table(json.dumps({"entries": [{**entry, "tiles": {"columns": 4}}]}))
    for shape, shipped in load_few_rows_table(H200).items():
        assert 1 <= shape.num_rows <= MAX_FEW_ROWS
        assert shipped.tiles.rows & (shipped.tiles.rows - 1) == 0
        assert shape.num_rows <= MAX_LANE_ROWS or shipped.tiles.products
        assert not shipped.tiles.products or shipped.tiles.rows % 8 == 0
        assert shipped.tiles.num_warps in (1, 2, 4, 8, 16)
