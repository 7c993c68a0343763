"""What the engine tells for metrics, on request: its status, and what only a monitor wants to know."""

from dataclasses import dataclass, field
from enum import StrEnum

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.durations import DurationCounts
from inference_service.domain.engine import EngineStatus


class LoadStage(StrEnum):
    """A part of an adapter's way to the device."""

    FETCH = "fetch"
    READ = "read"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class StageCounts:
    """One stage: how long those that succeeded took, and how many failed for good, by the error's reason."""

    stage: LoadStage
    durations: DurationCounts
    failures: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Digests that running and waiting requests name, and how many requests wait for their adapter."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    num_waiting_for_adapter: int = 0


@dataclass(frozen=True, slots=True)
class ResidencyCounts:
    """Revisions by place. `listed` are some in host memory or above: on the device first, then by use."""

    listed: tuple[tuple[str, ResidencyTier], ...] = ()
    num_by_tier: tuple[tuple[ResidencyTier, int], ...] = ()
    slot_evictions: int = 0
    host_evictions: int = 0
    stages: tuple[StageCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """As of one moment between two steps."""

    status: EngineStatus = field(default_factory=EngineStatus)
    step_durations: DurationCounts = field(default_factory=DurationCounts)
    use: AdapterUse = field(default_factory=AdapterUse)
    residency: ResidencyCounts = field(default_factory=ResidencyCounts)
    prefix_query_tokens: int = 0
