"""When requests are sent: so many at a time (closed loop), or at given moments (open loop)."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lorikeet_bench.load.lengths import LoadError


class Pace(StrEnum):
    """How an open loop spaces its requests."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests are open at any time: each that ends is followed by another at once."""

    concurrency: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """`rate` requests a second. A burst sends `burst` at once, every burst / rate seconds."""

    rate: float
    pace: Pace = Pace.POISSON
    burst: int = 8

    def __post_init__(self) -> None:
        if self.pace is not Pace.RECORDED and not (0 < self.rate < 1e6 and self.burst >= 1):
            raise LoadError(f"rate {self.rate:g} must be above 0, and burst {self.burst} at least 1")

    @property
    def name(self) -> str:
        """For tables."""
        return "recorded arrivals" if self.pace is Pace.RECORDED else f"{self.pace} {self.rate:g}/s"

    def arrivals(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds since the load's beginning, never falling; endless."""
        assert self.pace is not Pace.RECORDED, "recorded arrivals come from the file"
        now_s = 0.0
        while True:
            if self.pace is Pace.BURST:
                for _ in range(self.burst):
                    yield now_s
                now_s += self.burst / self.rate
            elif self.pace is Pace.CONSTANT:
                yield now_s
                now_s += 1 / self.rate
            else:
                now_s += float(rng.exponential(1 / self.rate))
                yield now_s


Arrivals = ClosedLoop | OpenLoop
