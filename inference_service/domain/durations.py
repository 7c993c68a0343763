"""How long things took, as counts in fixed buckets: small enough to cross processes."""

from bisect import bisect_left
from dataclasses import dataclass

# Steps of a small model take a millisecond, loads of a large adapter from a far store a minute.
DURATION_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DurationCounts:
    """`counts[i]` durations lie between bound i - 1, not included, and bound i; the last above all bounds."""

    counts: tuple[int, ...] = (0,) * (len(DURATION_BOUNDS_S) + 1)
    sum_s: float = 0.0

    @property
    def num(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    def __add__(self, other: "DurationCounts") -> "DurationCounts":
        """Both together."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return DurationCounts(counts, self.sum_s + other.sum_s)


class Durations:
    """Counts durations. For one owner."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def counts(self) -> DurationCounts:
        """As of now."""
        return DurationCounts(tuple(self._counts), self._sum_s)
