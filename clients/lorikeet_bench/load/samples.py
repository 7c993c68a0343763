"""Measured requests with their answers, kept for who looks at them afterwards."""

from dataclasses import dataclass

from lorikeet_bench.load.driver import LoadOutcome
from lorikeet_bench.load.plan import LoadPlan, PlannedRequest

_MOST_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured request with its answer."""

    request: PlannedRequest
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class SampleKeeper:
    """Keeps of each point as many answered requests as were open at once."""

    def __init__(self) -> None:
        self._samples: dict[LoadPlan, tuple[Sample, ...]] = {}

    def keep(self, outcome: LoadOutcome) -> None:
        """Take what a run brought; a later run of the same point replaces it."""
        count = min(outcome.plan.most_open or _MOST_SAMPLES, _MOST_SAMPLES)
        good = [record for record in outcome.records if record.is_ok][:count]
        self._samples[outcome.plan] = tuple(
            Sample(record.request, tuple(record.prompt_token_ids), tuple(record.token_ids)) for record in good
        )

    def samples(self, plan: LoadPlan) -> tuple[Sample, ...]:
        """Of a point; empty if nothing of it was answered."""
        return self._samples.get(plan, ())
