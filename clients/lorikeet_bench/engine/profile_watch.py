"""Profiles decode steps: the backend of a profile's engine process.

torch.profiler (CUPTI on a GPU) runs over a few steps in which all requests decode; kernels inside replayed
graphs are told one by one.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from inference_service.execution.backend import load_backend
from inference_service.execution.config import BackendConfig
from inference_service.ports import Backend
from lorikeet_bench.engine.decode_profile import DecodeProfile, GapTime, OpTime, parts_in_order
from lorikeet_bench.engine.kernel_parts import part_of
from lorikeet_bench.engine.watched_runner import DecodeStep, WatchedBackend, WatchedRunner, trace_file
from lorikeet_bench.load.model_part import ModelPart

ROWS_VARIABLE, STEPS_VARIABLE = "LORIKEET_BENCH_PROFILE_ROWS", "LORIKEET_BENCH_PROFILE_STEPS"
# Steps before the profiled ones, by which the undisturbed step is timed.
QUIET_STEPS = 16
_NUM_GAPS = 12


def load_profiled_backend(config: BackendConfig) -> Backend:
    """The real backend; when as many requests decode as were asked for, their profile is written."""
    backend = load_backend(config)
    rows = [int(count) for count in os.environ[ROWS_VARIABLE].split(",")]
    watch = _ProfileWatch(rows, int(os.environ[STEPS_VARIABLE]), Path(trace_file()))
    return WatchedBackend(backend, WatchedRunner(backend.runner, watch.step))


def profile_file(directory: Path, point: int) -> Path:
    """Where the profile of a load lies, by its place in their order."""
    return directory / f"{point}.json"


@dataclass(slots=True)
class _ProfileWatch:
    """For each load in turn: quiet steps, then profiled ones; a step that is not whole starts over.

    `rows` are the loads' requests. The steps behind a load's profile are not the next one's, though they may
    have as many rows: that begins with a prompt.
    """

    rows: list[int]
    num_steps: int
    directory: Path
    is_on_gpu: bool = field(default_factory=torch.cuda.is_initialized)
    launched_s: list[float] = field(default_factory=list[float])
    slots: tuple[int, ...] = ()
    profiler: Any = None
    num_done: int = 0
    is_begun: bool = False

    @contextmanager
    def step(self, step: DecodeStep | None) -> Generator[None]:
        if self.num_done < len(self.rows):
            self._before(step)
        yield

    def _before(self, step: DecodeStep | None) -> None:
        self.is_begun = self.is_begun or step is None
        if step is None or not self.is_begun or len(step.slots) != self.rows[self.num_done]:
            self._stop()
            self.launched_s.clear()
            return
        self.slots = step.slots
        self.launched_s.append(time.perf_counter())
        if len(self.launched_s) == QUIET_STEPS + 1:
            self._drain()
            activities = [ProfilerActivity.CUDA if self.is_on_gpu else ProfilerActivity.CPU]
            self.profiler = profile(activities=activities)
            self.profiler.start()
        elif len(self.launched_s) == QUIET_STEPS + 1 + self.num_steps:
            self._drain()
            profiler = self._stop()
            # Whole or not at all: the other process looks for it.
            path = profile_file(self.directory, self.num_done)
            temporary = path.with_suffix(".part")
            temporary.write_bytes(msgspec.json.encode(self._profile(profiler)))
            temporary.rename(path)
            self.num_done += 1
            self.is_begun = False
            self.launched_s.clear()

    def _drain(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def _stop(self) -> Any:
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def _profile(self, profiler: Any) -> DecodeProfile:
        quiet = self.launched_s[: QUIET_STEPS + 1]
        gaps_s = [after - before for before, after in pairwise(quiet)]
        make: Callable[..., DecodeProfile] = gpu_profile if self.is_on_gpu else cpu_profile
        return make(
            profiler,
            steps=self.num_steps,
            rows=self.rows[self.num_done],
            adapters=len({slot for slot in self.slots if slot >= 0}),
            step_us=1e6 * statistics.median(gaps_s),
        )


def cpu_profile(profiler: Any, *, steps: int, rows: int, adapters: int, step_us: float) -> DecodeProfile:
    """Operators by their own time."""
    ops = tuple(
        OpTime(event.key, part_of(event.key), event.count / steps, event.self_cpu_time_total / steps)
        for event in sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    )
    return DecodeProfile("cpu", steps, rows, adapters, step_us, sum(op.us for op in ops), 0.0, ops)


def gpu_profile(profiler: Any, *, steps: int, rows: int, adapters: int, step_us: float) -> DecodeProfile:
    """Kernels and copies as the device ran them, and what lay between."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA  # pybind makes a new object at each read
    )
    if not spans:
        raise RuntimeError("the profiler saw no kernel: CUPTI is missing, or this user may not use it")
    ops, gaps, busy_us, gap_us = summarize_spans(spans, steps)
    return DecodeProfile(
        torch.cuda.get_device_name(), steps, rows, adapters, step_us, busy_us, gap_us, ops, gaps
    )


def summarize_spans(
    spans: Iterable[tuple[float, float, str]], steps: int
) -> tuple[tuple[OpTime, ...], tuple[GapTime, ...], float, float]:
    """Per step: ops by time, the largest gaps, microseconds busy and idle.

    Args:
        spans: (begin, end, name) in microseconds, by their begin; those of several streams overlap.
        steps: how many steps they are of.
    """
    spans = list(spans)
    parts = parts_in_order([name for _, _, name in spans])
    calls: dict[tuple[str, ModelPart], list[float]] = defaultdict(list)
    between: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy_us = 0.0
    last_end: float | None = None
    last_name = ""
    for (begin, end, name), part in zip(spans, parts, strict=True):
        calls[name, part].append(end - begin)
        if last_end is not None and begin > last_end:
            between[last_name, name].append(begin - last_end)
        busy_us += max(0.0, end - (begin if last_end is None else max(begin, last_end)))
        if last_end is None or end >= last_end:
            last_end, last_name = end, name
    ops = [OpTime(*key, len(times) / steps, sum(times) / steps) for key, times in calls.items()]
    gaps = [
        GapTime(after, before, len(times) / steps, sum(times) / steps)
        for (after, before), times in between.items()
    ]
    return (
        tuple(sorted(ops, key=lambda op: -op.us)),
        tuple(sorted(gaps, key=lambda gap: -gap.us)[:_NUM_GAPS]),
        busy_us / steps,
        sum(gap.us for gap in gaps),
    )
