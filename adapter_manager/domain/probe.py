"""What a node found when it compared a revision with the base model on a short prompt."""

from dataclasses import dataclass
from enum import StrEnum


class ProbeVerdict(StrEnum):
    """What a revision does to the model's output, as far as one prompt tells."""

    CHANGES = "changes"
    CHANGES_NOTHING = "changes_nothing"
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    """Differences of log-probabilities: `noise` is between two runs of the base model. 0 if not finite."""

    verdict: ProbeVerdict
    max_difference: float
    noise: float
    top1_changes: int
    positions: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Findings with their origin; kept with the content, so that all names of it share them."""

    findings: ProbeFindings
    node: str
    time_s: float
