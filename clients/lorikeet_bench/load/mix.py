"""Which adapter each request names: in turn, uniform or Zipf, with a share for the base model."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lorikeet_bench.load.lengths import LoadError


class Popularity(StrEnum):
    """How requests spread over adapters."""

    ROUND_ROBIN = "round-robin"
    UNIFORM = "uniform"
    ZIPF = "zipf"


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """`alpha` is Zipf's: adapter i is asked for in proportion to 1 / (i + 1) ** alpha.

    `base_share` of the requests, drawn one by one, go to the base model whatever the popularity.
    """

    popularity: Popularity = Popularity.ROUND_ROBIN
    alpha: float = 1.0
    base_share: float = 0.0

    @classmethod
    def parse(cls, text: str, base_share: float) -> "AdapterMix":
        """Read "round-robin", "uniform" or "zipf:1.2"."""
        name, _, alpha = text.partition(":")
        if name not in set(Popularity) or bool(alpha) != (name == Popularity.ZIPF):
            raise LoadError(f"--mix {text!r} is none of round-robin, uniform, zipf:ALPHA, e.g. zipf:1.0")
        try:
            mix = cls(Popularity(name), float(alpha or 1.0), base_share)
        except ValueError as error:
            raise LoadError(f"mix {text!r}: {alpha!r} is no number") from error
        if not (0 <= mix.alpha <= 10 and 0 <= base_share <= 1):
            raise LoadError("zipf's alpha must be in [0, 10] and base_share in [0, 1]")
        return mix

    def shares(self, num_adapters: int) -> np.ndarray:
        """Each adapter's expected share [N] of the requests that name one; sums to 1."""
        alpha = self.alpha if self.popularity is Popularity.ZIPF else 0.0
        weights = (1.0 + np.arange(num_adapters)) ** -alpha
        return weights / weights.sum()


class AdapterChoice:
    """Draws adapters, one after the other; the same for the same generator.

    Args:
        mix: how.
        num_adapters: 0 gives the base model always.
        rng: whose state moves on with each draw.
    """

    def __init__(self, mix: AdapterMix, num_adapters: int, rng: np.random.Generator) -> None:
        self._mix = mix
        self._num_adapters = num_adapters
        self._rng = rng
        self._turn = 0
        self._cumulative = np.cumsum(mix.shares(num_adapters)) if num_adapters else None

    def draw(self) -> int | None:
        """The next request's adapter, counted from 0; None is the base model."""
        if self._cumulative is None:
            return None
        if self._mix.base_share and self._rng.random() < self._mix.base_share:
            return None
        if self._mix.popularity is Popularity.ROUND_ROBIN:
            self._turn += 1
            return (self._turn - 1) % self._num_adapters
        place = int(np.searchsorted(self._cumulative, self._rng.random(), side="right"))
        return min(place, self._num_adapters - 1)  # the last sum may be a rounding below 1
