"""What loads came to, stage by stage."""

from collections import Counter

from inference_service.domain.durations import Durations
from inference_service.domain.engine_report import LoadStage, StageCounts


class LoadStats:
    """Counts the stages that succeeded, with their time, and those that failed for good, by reason."""

    def __init__(self) -> None:
        self._durations = {stage: Durations() for stage in LoadStage}
        self._failures: dict[LoadStage, Counter[str]] = {stage: Counter() for stage in LoadStage}

    def took(self, stage: LoadStage, seconds: float) -> None:
        """A stage succeeded."""
        self._durations[stage].add(seconds)

    def failed(self, stage: LoadStage, reason: str) -> None:
        """A stage failed; `reason` is an error's."""
        self._failures[stage][reason] += 1

    def counts(self) -> tuple[StageCounts, ...]:
        """As of now, a value for each stage."""
        return tuple(
            StageCounts(stage, self._durations[stage].counts(), tuple(sorted(self._failures[stage].items())))
            for stage in LoadStage
        )
