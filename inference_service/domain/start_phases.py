"""How long the parts of a start took."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

PhaseSeconds = tuple[tuple[str, float], ...]
"""Names and seconds, in the order in which the phases ended."""


@dataclass(slots=True)
class StartPhases:
    """Times parts of a start, on whatever thread they run. A part that fails is not noted."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time a part."""
        begun_s = time.monotonic()
        yield
        self.note(name, time.monotonic() - begun_s)

    def note(self, name: str, seconds: float) -> None:
        """A part that was timed elsewhere."""
        self.seconds[name] = round(seconds, 3)

    def all(self) -> PhaseSeconds:
        """What was timed until now."""
        return tuple(self.seconds.items())
