"""Many seeds on watched child processes: a crash, a hang and a broken promise are each named by seed."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.fuzz.drafts import make_draft

# Far above what a case may take: only one that does not come back is killed, the child itself judges time.
HANG_CPU_S = 20.0
HANG_WALL_S = 120.0
_TICK_S = 0.5


@dataclass
class Tally:
    """What a campaign came to. `failures` are by seed."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    compared: int = 0
    most_cpu_s: float = 0.0
    most_growth_bytes: int = 0
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Directories that were tried."""
        return self.outcomes.total() + len(self.failures)

    def line(self) -> str:
        """For people."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.outcomes.items()))
        return (
            f"{self.total} mutated directories: {kinds}, failed {len(self.failures)}; "
            f"{self.compared} payloads compared; at most {self.most_cpu_s:.2f} s of processor time and "
            f"{self.most_growth_bytes / 2**20:.0f} MiB"
        )


def run_campaign(first: int, count: int, *, workers: int, keep: Path) -> Tally:
    """Run the seeds [first, first + count); what fails is kept in `keep`, a directory for each seed."""
    tallies = [Tally() for _ in range(workers)]
    threads = [
        threading.Thread(target=_run_worker, args=(range(first + w, first + count, workers), tally))
        for w, tally in enumerate(tallies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = Tally()
    for tally in tallies:
        whole.outcomes += tally.outcomes
        whole.compared += tally.compared
        whole.most_cpu_s = max(whole.most_cpu_s, tally.most_cpu_s)
        whole.most_growth_bytes = max(whole.most_growth_bytes, tally.most_growth_bytes)
        whole.failures |= tally.failures
    for seed, why in whole.failures.items():
        _keep(seed, why, keep)
    return whole


def _run_worker(seeds: range, tally: Tally) -> None:
    while seeds:
        last = _run_child(seeds, tally)
        if last is None:
            return
        # It died with this seed, or was killed for it: go on behind it.
        seeds = seeds[seeds.index(last) + 1 :]


def _run_child(seeds: range, tally: Tally) -> int | None:
    """Run until all are done (None), or until the child is gone: then the seed that it was at."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "tests.support.fuzz.child", root]
        current, why = seeds[0], ""
        with subprocess.Popen(
            [*command, *(str(n) for n in (seeds.start, seeds.stop, seeds.step))],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).resolve().parents[3],
        ) as process:
            try:
                for document in _watched(process):
                    if isinstance(document, str):
                        why = document
                        break
                    current = document.get("begin", current)
                    _count(document, tally)
            finally:
                process.kill()
                status = process.wait()
        if not why and status == 0:
            return None
        log.seek(0)
        end = log.read().decode(errors="replace")[-2000:]
        tally.failures[current] = why or f"the process ended with {status}: {end}"
        return current


def _watched(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any] | str]:
    """What the child tells, until its end; a text instead where a case does not come back."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    watched = psutil.Process(process.pid)
    since_wall_s, since_cpu_s = time.monotonic(), 0.0
    while True:
        try:
            line = lines.get(timeout=_TICK_S)
        except queue.Empty:
            try:
                cpu_s = sum(watched.cpu_times()[:2]) - since_cpu_s
            except psutil.NoSuchProcess:
                continue
            wall_s = time.monotonic() - since_wall_s
            if cpu_s > HANG_CPU_S or wall_s > HANG_WALL_S:
                yield f"hangs: {wall_s:.0f} s, {cpu_s:.0f} s of them computing"
                return
            continue
        if line is None:
            process.wait()
            return
        since_wall_s = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            since_cpu_s = sum(watched.cpu_times()[:2])
        yield json.loads(line)


def _count(document: dict[str, Any], tally: Tally) -> None:
    if "failed" in document:
        tally.failures[document["failed"]] = document["why"]
    elif "ended" in document:
        tally.outcomes[document["kind"]] += 1
        tally.compared += document["compared"]
        tally.most_cpu_s = max(tally.most_cpu_s, document["cpu_s"])
        tally.most_growth_bytes = max(tally.most_growth_bytes, document["growth"])


def _keep(seed: int, why: str, keep: Path) -> None:
    """The directory, and how it was made."""
    draft = make_draft(seed)
    place = keep / str(seed)
    place.mkdir(parents=True, exist_ok=True)
    draft.write(place / "adapter")
    recipe = {"seed": seed, "source": draft.source, "recipe": draft.recipe, "links": draft.links, "why": why}
    (place / "recipe.json").write_text(json.dumps(recipe, indent=1))
