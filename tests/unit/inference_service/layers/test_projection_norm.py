"""Norms over a whole projection, and what queries grow by, against their formulas."""

import math

import torch

from inference_service.layers.projection_norm import ProjectionNorm
from inference_service.layers.query_temperature import temperature_factors


def test_projection_norm_is_over_all_heads_together() -> None:
    """Queries and keys each as one wide row; values stay."""
    q_weight, k_weight = torch.rand(24) + 0.5, torch.rand(12) + 0.5
    before = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    after = before.clone()
    ProjectionNorm(q_weight, k_weight, 1e-5)(after[:, :4], after[:, 4:6])
    assert torch.equal(after[:, 6:], before[:, 6:])
    for heads, weight in ((slice(0, 4), q_weight), (slice(4, 6), k_weight)):
        for row, result in zip(before[:, heads].flatten(1), after[:, heads].flatten(1), strict=True):
            torch.testing.assert_close(result, row / math.sqrt(float(row.square().mean()) + 1e-5) * weight)


def test_temperature_grows_with_the_intervals_behind_a_position() -> None:
    """The first interval is left alone."""
    factors = temperature_factors(0.1, 4, 18, torch.device("cpu"))
    expected = [1 + 0.1 * math.log(1 + (position + 1) // 4) for position in range(18)]
    torch.testing.assert_close(factors, torch.tensor(expected))
