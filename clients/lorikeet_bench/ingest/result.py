"""What a benchmark of ingest found, and whether that is enough."""

import statistics
from dataclasses import dataclass

from lorikeet_bench.ingest.floors import Floors
from lorikeet_bench.ingest.gpt_oss_adapter import AdapterLayout
from lorikeet_bench.machine import Machine

MIN_INGEST_MB_S = 400.0
MAX_PEAK_BYTES = 300_000_000


@dataclass(frozen=True, slots=True)
class PushFigures:
    """One push, in seconds.

    The client hashes, then sends while the manager stages and hashes. Then the manager verifies (what of
    the hashing is left), builds (checks the adapter and writes the payload: the ingest step proper) and
    registers (store, fsync, registry). `manager_cpu_s` is the processor time of all its threads for the whole
    push, which a busy machine changes less. `peak_bytes` is its highest resident size, `start_bytes` that
    before.
    """

    total_s: float
    hash_s: float
    send_s: float
    verify_s: float
    build_s: float
    register_s: float
    manager_cpu_s: float
    start_bytes: int
    peak_bytes: int

    @property
    def rest_s(self) -> float:
        """What belongs to none of the stages: the connection, the header, the nodes' catalogs, the reply."""
        return self.total_s - self.hash_s - self.send_s - self.verify_s - self.build_s - self.register_s


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """All pushes of one layout. Rates are medians, in MB/s (10**6 bytes of the adapter's weights)."""

    layout: AdapterLayout
    weight_bytes: int
    payload_bytes: int
    tensors: int
    pushes: tuple[PushFigures, ...]

    def median_s(self, stage: str) -> float:
        """The median of a stage, by its field's name."""
        return statistics.median(getattr(push, stage) for push in self.pushes)

    def mb_s(self, stage: str) -> float:
        """The rate of that stage."""
        return self.weight_bytes / 1e6 / max(self.median_s(stage), 1e-9)

    @property
    def peak_bytes(self) -> int:
        """The manager's highest resident size in any push."""
        return max(push.peak_bytes for push in self.pushes)


@dataclass(frozen=True, slots=True)
class IngestResult:
    """The whole benchmark."""

    machine: Machine
    rank: int
    floors: Floors
    layouts: tuple[LayoutFigures, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Which layout misses which bound."""
        found = list[str]()
        for figures in self.layouts:
            rate, peak = figures.mb_s("build_s"), figures.peak_bytes
            if rate < MIN_INGEST_MB_S:
                found.append(f"{figures.layout}: ingest at {rate:.0f} MB/s, below {MIN_INGEST_MB_S:.0f}")
            if peak >= MAX_PEAK_BYTES:
                found.append(
                    f"{figures.layout}: {peak / 1e6:.0f} MB at most, not below {MAX_PEAK_BYTES / 1e6:.0f}"
                )
        return tuple(found)
