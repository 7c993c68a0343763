"""What the rule loses against a table: which points are held, and the summary; no GPU."""

import json

import pytest

from lorikeet_kernels.benchmarking.bench_problem import DENSE, MODELS
from lorikeet_kernels.benchmarking.rule_check import (
    RuleRow,
    checked_points,
    line,
    rows_as_json,
    shapes_of,
    summary,
)
from lorikeet_kernels.benchmarking.tune_plan import TunePoint, points_of
from lorikeet_kernels.tiling import OpShape
from lorikeet_kernels.tiling.tile_table import TileEntry, TileTable

SHAPE = OpShape("gate_up", 2880, 5760, 16, 64)
TABLE = TileTable("a card", "", (TileEntry("pair", SHAPE, 0, {}, 1.0),))


def _row(rule: str, tuned: str, us: dict[str, float]) -> RuleRow:
    return RuleRow("gpt-oss-20b", "pair", 0, SHAPE, rule, tuned, us)


def test_a_point_is_checked_where_the_table_holds_one_of_its_shapes() -> None:
    """One model of the two that are asked about, at one of two numbers of tokens and one of two ranks."""
    points = points_of([16, 64], [16, 32])
    found = checked_points(TABLE, ["gpt-oss-20b", "qwen3-30b-a3b"], points)
    assert [(name, p.num_tokens, p.rank) for name, p in found] == [("gpt-oss-20b", 16, 16)]


def test_shapes_are_those_of_both_projections_or_of_the_fused_one() -> None:
    """A MoE has two a point, a dense projection one over all its sites."""
    up, down = shapes_of(MODELS[0], TunePoint(16, 16, 1.0))
    assert up == SHAPE
    assert (down.op, down.in_features, down.num_pairs) == ("down", 2880, 64)
    assert shapes_of(DENSE[0], TunePoint(32, 16, 1.0)) == [OpShape("linear", 2880, 5120, 16, 32)]
    gate_up = next(dense for dense in DENSE if dense.name == "llama-3.3-70b mlp_gate_up")
    assert shapes_of(gate_up, TunePoint(32, 16, 1.0)) == [OpShape("linear", 8192, 57344, 16, 32)]
    assert gate_up.adapter_elements == 2 * 8192 + 57344
    assert DENSE[0].adapter_elements == 3 * 2880 + 5120


def test_loss_is_zero_for_the_same_tiles_and_infinite_for_tiles_that_do_not_fit() -> None:
    """Tiles that did not compile have no time."""
    assert _row("a", "a", {}).loss == 0.0
    assert _row("a", "b", {"a": 3.0, "b": 2.0}).loss == pytest.approx(0.5)
    assert _row("a", "b", {"b": 2.0}).loss == float("inf")


def test_summary_counts_what_lies_beyond_the_limit() -> None:
    """Geometric mean of 1 and 1.5625 is 1.25."""
    rows = [_row("a", "a", {}), _row("a", "b", {"a": 3.125, "b": 2.0})]
    assert summary(rows) == "rule against table: 2 cases, geomean +25.0%, worst +56%, 1 beyond 25%"
    assert line(rows[1]).startswith(" +56% gpt-oss-20b pair 0 gate_up 2880x5760 64 pairs r16: b 2.00 us")
    assert [row["loss"] for row in json.loads(rows_as_json(rows))] == [0.0, 0.5625]
    assert "nothing" in summary([])
