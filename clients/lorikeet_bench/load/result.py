"""A bench's whole result: points, their repeats and medians, and what speaks against believing it."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from lorikeet_bench.load.generator_cost import WARN_SHARE
from lorikeet_bench.load.metrics import LoadSummary
from lorikeet_bench.load.routing import RoutingSummary
from lorikeet_bench.machine import Machine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PointResult:
    """One point: `median` holds, figure by figure, the median over `repeats`.

    `tokens_digest` stands for the answers' tokens of the first repeat. `wrong` counts answers that were not
    what was asked, `wrong_shown` describes the first of them.
    """

    name: str
    adapters: int
    concurrency: int | None
    rate: float | None
    repeats: tuple[LoadSummary, ...]
    median: LoadSummary
    tokens_digest: str
    wrong: int = 0
    checked_tokens: int = 0
    wrong_shown: tuple[str, ...] = ()
    routing: RoutingSummary | None = None

    @property
    def came_in_bursts(self) -> bool:
        """Whether too many tokens came at once for figures of single tokens."""
        return self.median.burst_share > WARN_SHARE


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was measured. `startup_s` is from spawning the process to READY; None where it ran already.

    `startup_phases` are the engine's seconds of it; some phases run side by side, others are not named.
    `compilations` are kernel compilations and graph captures after READY.
    """

    model: str
    dtype: str
    device: str
    slots: int
    startup_s: float | None
    adapter_bytes: int
    adapter_load_s: float | None
    compilations: int
    preemptions: int = 0
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    startup_phases: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`boundary` says where the clock stood. `routing_floor` None does not judge the routing."""

    boundary: str
    machine: Machine
    load: dict[str, Any]
    servers: tuple[ServerFacts, ...]
    points: tuple[PointResult, ...]
    routing_floor: float | None = None

    @property
    def failures(self) -> list[str]:
        """Why the figures must not be used; empty if they may be."""
        found: list[str] = []
        for point in self.points:
            if point.wrong:
                found.append(
                    f"{point.name}: {point.wrong} answers were wrong; {'; '.join(point.wrong_shown)}"
                )
            failed = sum(sum(repeat.failures.values()) for repeat in point.repeats)
            if failed:
                kinds = sorted({kind for repeat in point.repeats for kind in repeat.failures})
                found.append(f"{point.name}: {failed} requests failed ({', '.join(kinds)})")
            routing, floor = point.routing, self.routing_floor
            if routing and floor and routing.share < floor:
                found.append(
                    f"{point.name}: VOID, its steps read {routing.experts:.1f} experts a layer, "
                    f"{100 * routing.share:.1f} % of the {routing.expected_experts:.1f} that even routing "
                    f"reads; {100 * floor:g} % are asked"
                )
        return found

    @property
    def warnings(self) -> list[str]:
        """What to keep in mind."""
        found = [
            f"{point.name}: {warning}" for point in self.points for warning in point.median.generator.warnings
        ]
        found.extend(
            f"{point.name}: {100 * point.median.burst_share:.0f} % of the tokens came in bursts, several at "
            "once: times between tokens and the decode rates of single requests tell when they arrived, not "
            "when they were made; end to end, overall and total rates hold"
            for point in self.points
            if point.came_in_bursts
        )
        for server in self.servers:
            if server.compilations:
                found.append(f"{server.compilations} kernel compilations or graph captures after READY")
            if server.preemptions:
                found.append(
                    f"{server.preemptions} requests were preempted: the cache was too small for the load"
                )
        return found


def median_of(values: Sequence[T]) -> T:
    """Field by field: medians of numbers, sums of counts by name, the first of anything else."""
    return _median(values)


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        made = {f.name: _median([getattr(value, f.name) for value in values]) for f in fields(first)}
        return type(first)(**made)
    if isinstance(first, dict):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    middle = statistics.median(values)
    return round(middle) if isinstance(first, int) else middle
