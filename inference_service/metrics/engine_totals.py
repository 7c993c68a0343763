"""The engine's counters over the lives of its process: each begins at nothing, their sums never fall."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from inference_service.domain.durations import DurationCounts
from inference_service.domain.engine_report import EngineReport, LoadStage

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Counters by what they count; `numbers` by metric name."""

    numbers: Mapping[str, int] = field(default_factory=dict[str, int])
    evictions: Mapping[str, int] = field(default_factory=dict[str, int])
    load_failures: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    steps: DurationCounts = field(default_factory=DurationCounts)
    loads: Mapping[LoadStage, DurationCounts] = field(
        default_factory=lambda: dict.fromkeys(LoadStage, DurationCounts())
    )

    @staticmethod
    def of(report: EngineReport) -> "EngineTotals":
        """Those of one report."""
        status, residency = report.status, report.residency
        stages = {counts.stage: counts for counts in residency.stages}
        return EngineTotals(
            numbers={
                "lorikeet_engine_steps": status.steps,
                "lorikeet_preemptions": status.preemptions,
                "lorikeet_prefix_cache_hit_tokens": status.prefix_hit_tokens,
                "lorikeet_prefix_cache_query_tokens": report.prefix_query_tokens,
                "lorikeet_compilations": status.compilations,
            },
            evictions={"active": residency.slot_evictions, "host": residency.host_evictions},
            load_failures={
                (counts.stage.value, reason): count
                for counts in residency.stages
                for reason, count in counts.failures
            },
            steps=report.step_durations,
            loads={s: stages[s].durations if s in stages else DurationCounts() for s in LoadStage},
        )

    def __add__(self, other: "EngineTotals") -> "EngineTotals":
        """Both together."""
        return EngineTotals(
            numbers=_added(self.numbers, other.numbers),
            evictions=_added(self.evictions, other.evictions),
            load_failures=_added(self.load_failures, other.load_failures),
            steps=self.steps + other.steps,
            loads={stage: self.loads[stage] + other.loads[stage] for stage in LoadStage},
        )


class LifetimeTotals:
    """Adds up one engine process after the other. What one counted after its last report is lost with it."""

    def __init__(self) -> None:
        self._ended = EngineTotals.of(EngineReport())
        self._current = self._ended
        self._instance_id = ""

    def take(self, instance_id: str, report: EngineReport) -> EngineTotals:
        """The sums with a running engine's newest report."""
        if instance_id != self._instance_id:
            self._ended = self._ended + self._current
            self._instance_id = instance_id
        self._current = EngineTotals.of(report)
        return self.sums()

    def sums(self) -> EngineTotals:
        """The sums as they were last known."""
        return self._ended + self._current


def _added(first: Mapping[Key, int], second: Mapping[Key, int]) -> dict[Key, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in (*first, *second)}
