"""The steps on query and key heads, against their formulas head by head."""

import math

import pytest
import torch

from inference_service.layers.head_steps import (
    HeadStep,
    PairwiseRotary,
    ProjectionNorm,
    QueryTemperature,
    UnitNorm,
    temperature_factors,
)
from inference_service.layers.rope import RopeParameters, rope_table

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 3, 17])


def applied(step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
    """The step on 4 query heads and 2 key heads of a projection with 2 value heads, before and after it."""
    before = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    after = before.clone()
    step(after[:, :4], after[:, 4:6], POSITIONS)
    assert torch.equal(after[:, 6:], before[:, 6:])
    return before, after


def test_projection_norm_is_over_all_heads_together() -> None:
    """Queries and keys each as one wide row."""
    q_weight, k_weight = torch.rand(24) + 0.5, torch.rand(12) + 0.5
    before, after = applied(ProjectionNorm(q_weight, k_weight, 1e-5))
    for heads, weight in ((slice(0, 4), q_weight), (slice(4, 6), k_weight)):
        for row, result in zip(before[:, heads].flatten(1), after[:, heads].flatten(1), strict=True):
            torch.testing.assert_close(result, row / math.sqrt(float(row.square().mean()) + 1e-5) * weight)


def test_unit_norm_is_over_each_head() -> None:
    """Without a weight."""
    before, after = applied(UnitNorm(torch.ones(4, 6), 1e-5))
    expected = before[:, :6] / (before[:, :6].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(after[:, :6], expected)


def test_pairwise_rotary_is_a_complex_product() -> None:
    """Neighbours are real and imaginary parts."""
    table = rope_table(RopeParameters(6, 100.0), 18, CPU)
    before, after = applied(PairwiseRotary(table))
    for t, position in enumerate(POSITIONS.tolist()):
        for i in range(3):
            angle = position / 100.0 ** (2 * i / 6)
            turn = complex(math.cos(angle), math.sin(angle))
            for head in range(6):
                pair = complex(*before[t, head, 2 * i : 2 * i + 2].tolist()) * turn
                assert after[t, head, 2 * i : 2 * i + 2].tolist() == pytest.approx(
                    [pair.real, pair.imag], abs=1e-5
                )


def test_temperature_touches_queries_only() -> None:
    """It grows with the number of intervals behind a position; the first interval is left alone."""
    before, after = applied(QueryTemperature(temperature_factors(0.1, 4, 18, CPU)))
    assert torch.equal(after[:, 4:], before[:, 4:])
    for t, factor in enumerate((1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(5))):
        torch.testing.assert_close(after[t, :4], before[t, :4] * factor)
