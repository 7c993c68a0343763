"""How many experts a step reads, against what even routing would read. Pure.

A random model whose router collapses reads few experts, and then measures another machine than the one that
real traffic meets: such a run is void.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class RoutedStep(msgspec.Struct, frozen=True):
    """One decode step, summed over its `layers` MoE layers.

    `rows_by_slot` counts the step's rows by LoRA slot, the base model's under -1. `experts` and `pairs` are
    the distinct experts, and the distinct (expert, adapter) pairs of rows that have an adapter.
    """

    layers: int
    num_experts: int
    top_k: int
    rows_by_slot: dict[int, int]
    experts: int
    pairs: int

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return sum(self.rows_by_slot.values())


@dataclass(frozen=True, slots=True)
class RoutingSummary:
    """Averages per layer and step, over `steps` decode steps of `rows` tokens on average."""

    steps: int
    rows: float
    experts: float
    expected_experts: float
    pairs: float
    expected_pairs: float

    @property
    def share(self) -> float:
        """Distinct experts over the even expectation; 1 is even, less is skewed."""
        return self.experts / self.expected_experts if self.expected_experts else 0.0


def expected_distinct(num_experts: int, top_k: int, rows: float) -> float:
    """Distinct experts that `rows` tokens read if each picks `top_k` of them evenly: E (1 - (1 - K/E)^T)."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** rows)


def summarize_routing(steps: Sequence[RoutedStep]) -> RoutingSummary | None:
    """The averages; None where no step was seen."""
    if not steps:
        return None
    num_layers = sum(step.layers for step in steps)
    expected = sum(step.layers * expected_distinct(step.num_experts, step.top_k, step.rows) for step in steps)
    expected_pairs = sum(
        step.layers * expected_distinct(step.num_experts, step.top_k, rows)
        for step in steps
        for slot, rows in step.rows_by_slot.items()
        if slot >= 0
    )
    return RoutingSummary(
        steps=len(steps),
        rows=sum(step.rows for step in steps) / len(steps),
        experts=sum(step.experts for step in steps) / num_layers,
        expected_experts=expected / num_layers,
        pairs=sum(step.pairs for step in steps) / num_layers,
        expected_pairs=expected_pairs / num_layers,
    )
