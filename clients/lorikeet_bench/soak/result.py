"""What a soak found, and whether it passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorikeet_bench.machine import Machine
from lorikeet_bench.process_memory import MemoryTrend
from lorikeet_bench.soak.exchange import Fault

# A shorter run is a smoke test: it need not have met everything.
_WHOLE_S = 120.0
_MUST_HAPPEN = ("create", "replace", "delete", "unload", "pin", "unpin", "move an alias")


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Everything that is worth keeping. `churn` is operation → outcome → count."""

    machine: Machine
    duration_s: float
    seed: int
    streams_wanted: int
    streams_open_at_most: int
    adapters: int
    streams: Mapping[str, int]
    tokens: int
    wrong: int
    lost: int
    faults: Sequence[Fault]
    churn: Mapping[str, Mapping[str, int]]
    memory: Sequence[MemoryTrend]
    levels_before: Mapping[str, int]
    levels_after: Mapping[str, int]
    growth: Mapping[str, int]
    restarts: Sequence[str]
    # Why it ended before its time, without the comparisons that come at the end.
    cut_short: str = ""
    # Why adapters that it made may be left.
    left_over: str = ""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why it does not pass; empty if it does."""
        found = [self.cut_short] if self.cut_short else []
        found += [f"adapters may be left: {self.left_over}"] if self.left_over else []
        found += [f"{count} {what}" for what, count in (("wrong", self.wrong), ("lost", self.lost)) if count]
        found += [f"{name} restarted or ended" for name in self.restarts]
        found += [
            f"{t.process} is not flat: {100 * t.change:+.1f} %" for t in self.memory if t.is_flat is False
        ]
        found += [
            f"{name} did not return: {before} before, {self.levels_after[name]} after"
            for name, before in self.levels_before.items()
            if not self.cut_short and self.levels_after[name] != before
        ]
        return (*found, *(() if self.cut_short else self._too_easy()))

    @property
    def has_passed(self) -> bool:
        """Whether every promise was kept, under a load that means something."""
        return not self.failures

    def _too_easy(self) -> list[str]:
        if self.growth["compilations"]:
            return [f"{self.growth['compilations']} kernels were compiled while serving"]
        if self.duration_s < _WHOLE_S:
            return []
        found = [
            f"too easy: no {kind}" for kind in _MUST_HAPPEN if not sum(self.churn.get(kind, {}).values())
        ]
        if self.streams_open_at_most < self.streams_wanted:
            found.append(f"too easy: never more than {self.streams_open_at_most} streams at once")
        must_grow = ("adapter loads", "adapter evictions", "prefix hit tokens")
        return [*found, *(f"too easy: no {counter}" for counter in must_grow if not self.growth[counter])]
