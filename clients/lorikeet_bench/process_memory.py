"""Memory of running processes over time, and whether it stays flat."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# Two medians of a small process differ by this much for no reason: malloc takes and returns whole arenas.
NOISE_BYTES = 512 * 1024
FLAT_WITHIN = 0.02
_FIFTHS = 5


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What a process has of its own, by `own_bytes`, at a time since the start."""

    at_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTrend:
    """First against last: the medians of the first and the last fifth of the time after the warm-up.

    A median over a fifth of the time is not moved by single spikes, and the two together see a slow leak as
    well as one step. `is_flat` None: too short to say.
    """

    process: str
    first_bytes: int
    last_bytes: int
    highest_bytes: int
    change: float
    is_flat: bool | None


def trend(process: str, samples: Sequence[MemorySample], warm_up_s: float) -> MemoryTrend:
    """Judge one process; `samples` are in order of time and not empty."""
    warm = [sample for sample in samples if sample.at_s >= warm_up_s]
    highest = max(sample.bytes for sample in samples)
    if len(warm) < 2 * _FIFTHS:
        first, last = samples[0].bytes, samples[-1].bytes
        return MemoryTrend(process, first, last, highest, last / first - 1, None)
    start_s, end_s = warm[0].at_s, warm[-1].at_s
    fifth_s = (end_s - start_s) / _FIFTHS
    first = int(statistics.median(s.bytes for s in warm if s.at_s <= start_s + fifth_s))
    last = int(statistics.median(s.bytes for s in warm if s.at_s >= end_s - fifth_s))
    is_flat = abs(last - first) <= max(FLAT_WITHIN * first, NOISE_BYTES)
    return MemoryTrend(process, first, last, highest, last / first - 1, is_flat)


def own_bytes(process: psutil.Process) -> int:
    """Memory that the process allocated: anonymous pages and shared memory, without those of files.

    Pages of programs and libraries are left out, because they are counted for one process or for none as
    others that use the same files come and go; by unique set size an idle engine changes by 100 MB.
    """
    if not psutil.LINUX:
        return process.memory_full_info().uss
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(process.pid) from error
    sizes = dict(line.split(":", 1) for line in status.splitlines())
    if "RssAnon" not in sizes:  # a process that ended and that nobody has waited for yet
        raise psutil.NoSuchProcess(process.pid)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def with_children(processes: Mapping[str, int]) -> dict[str, int]:
    """The processes and their descendants, each by a name of its own: `engine`, `store`, `engine #2`."""
    found = dict(processes)
    for pid in processes.values():
        for child in psutil.Process(pid).children(recursive=True):
            title = _title(child)
            count = sum(known == title or known.startswith(f"{title} #") for known in found)
            found[f"{title} #{count + 1}" if count else title] = child.pid
    return found


def _title(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    for word, title in (("resource_tracker", "tracker"), ("valkey", "store"), ("redis", "store")):
        if word in line:
            return title
    return "engine" if "python" in process.name() else process.name()


class MemorySampler:
    """Samples processes once a second while it is entered; one that ends is reported as ended."""

    def __init__(self, processes: Mapping[str, int], every_s: float = 1.0) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self._every_s = every_s
        self.samples: dict[str, list[MemorySample]] = {name: [] for name in processes}
        self.ended: set[str] = set()

    async def run(self) -> None:
        """Sample for ever; cancel to stop."""
        start_s = time.monotonic()
        while True:
            self._sample(time.monotonic() - start_s)
            await asyncio.sleep(self._every_s)

    def forget_after(self, at_s: float) -> None:
        """Drop the samples that were taken later."""
        for samples in self.samples.values():
            samples[:] = [sample for sample in samples if sample.at_s <= at_s]

    def latest(self) -> dict[str, int]:
        """The newest figure of each process."""
        return {name: samples[-1].bytes for name, samples in self.samples.items() if samples}

    def _sample(self, at_s: float) -> None:
        for name, process in self._processes.items():
            try:
                used = own_bytes(process)
            except psutil.NoSuchProcess:
                self.ended.add(name)
                continue
            self.samples[name].append(MemorySample(at_s, used))
