"""What comes of comparing an adapter with the base model on a short prompt."""

from dataclasses import dataclass
from enum import StrEnum


class ProbeVerdict(StrEnum):
    """What an adapter does to the model's output, as far as one prompt tells."""

    CHANGES = "changes"
    CHANGES_NOTHING = "changes nothing"
    NOT_FINITE = "not finite"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Differences of log-probabilities; 0 where the adapter's are not finite.

    `max_difference` is between adapter and base, `noise` between two runs of the base in the same batch: what
    rounding alone makes. `top1_changes` of `positions` have another most likely token.
    """

    verdict: ProbeVerdict
    max_difference: float
    noise: float
    top1_changes: int
    positions: int
