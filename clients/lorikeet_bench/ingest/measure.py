"""Pushes through the ordinary client, each stage timed on the side that does it."""

import os
import shutil
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from lorikeet_bench.ingest.floors import measure_floors
from lorikeet_bench.ingest.gpt_oss_adapter import (
    GPT_OSS_20B,
    AdapterLayout,
    GptOssShape,
    write_gpt_oss_adapter,
)
from lorikeet_bench.ingest.peak_memory import PeakMemory
from lorikeet_bench.ingest.result import IngestResult, LayoutFigures, PushFigures
from lorikeet_bench.machine import describe_machine
from lorikeet_client import Lorikeet, UploadProgress, UploadResult

_STAGES = "lorikeet_ingest_duration_seconds_sum"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """What to push, and how often."""

    layouts: tuple[AdapterLayout, ...]
    rank: int = 32
    repeats: int = 3
    shape: GptOssShape = GPT_OSS_20B


@dataclass(frozen=True, slots=True)
class ManagerUnderTest:
    """A running manager; the token is one of the tenant's, `metrics` its Prometheus endpoint's URL."""

    address: str
    token: str
    tenant: str
    pid: int
    metrics: str


def measure_ingest(
    manager: ManagerUnderTest, plan: IngestPlan, directory: Path, on_step: Callable[[str], object]
) -> IngestResult:
    """Push every layout `repeats` times from the page cache.

    Args:
        manager: nothing else uploads to it meanwhile.
        plan: what to push.
        directory: takes one adapter at a time.
        on_step: told what comes next.

    Raises:
        LorikeetError: a push fails.
        PeakMemoryError: the manager's memory cannot be measured.
    """
    layouts = list[LayoutFigures]()
    machine = describe_machine("grpcio", "numpy")
    largest = 0
    with Lorikeet(manager=manager.address, token=manager.token) as client:
        for layout in plan.layouts:
            on_step(f"{layout}: making the adapter")
            adapter = directory / layout
            try:
                largest = max(
                    largest, write_gpt_oss_adapter(adapter, layout, rank=plan.rank, shape=plan.shape)
                )
                layouts.append(_measure_layout(client, manager, plan, adapter, layout, on_step))
            finally:
                shutil.rmtree(adapter, ignore_errors=True)
    on_step("floors of this machine")
    return IngestResult(machine, plan.rank, measure_floors(directory, largest), tuple(layouts))


def _measure_layout(
    client: Lorikeet,
    manager: ManagerUnderTest,
    plan: IngestPlan,
    adapter: Path,
    layout: AdapterLayout,
    on_step: Callable[[str], object],
) -> LayoutFigures:
    pushes = list[PushFigures]()
    result: UploadResult | None = None
    for number in range(plan.repeats):
        name = f"{manager.tenant}/ingest-{layout}-{number}"
        on_step(f"{layout}: push {number + 1} of {plan.repeats}")
        _into_page_cache(adapter)
        # What was written before is on the disk: the kernel throttles who writes while much waits.
        os.sync()
        figures, result = _push(client, manager, adapter, name)
        pushes.append(figures)
        client.delete_adapter(name)
    assert result is not None, "a plan has a push at least"
    report = result.revision.report
    return LayoutFigures(
        layout=layout,
        weight_bytes=(adapter / "adapter_model.safetensors").stat().st_size,
        payload_bytes=result.revision.payload_bytes,
        tensors=report.tensors_used if report else 0,
        pushes=tuple(pushes),
    )


def _push(
    client: Lorikeet, manager: ManagerUnderTest, adapter: Path, name: str
) -> tuple[PushFigures, UploadResult]:
    seen_s = list[float]()

    def advance(_: UploadProgress) -> None:
        seen_s.append(time.perf_counter())

    process = psutil.Process(manager.pid)
    before, memory = _stages(manager.metrics), PeakMemory(manager.pid)
    cpu_s = sum(process.cpu_times()[:2])
    start_s = time.perf_counter()
    result = client.upload_adapter(adapter, name, progress=advance)
    end_s = time.perf_counter()
    peak, after = memory.highest_bytes(), _stages(manager.metrics)
    taken = {stage: after[stage] - before.get(stage, 0.0) for stage in after}
    figures = PushFigures(
        total_s=end_s - start_s,
        # The first progress comes when all is hashed and the stream begins, the last with the last chunk.
        hash_s=seen_s[0] - start_s,
        send_s=seen_s[-1] - seen_s[0],
        verify_s=taken["verify"],
        build_s=taken["build"],
        register_s=taken["register"],
        manager_cpu_s=sum(process.cpu_times()[:2]) - cpu_s,
        start_bytes=memory.start_bytes,
        peak_bytes=peak,
    )
    return figures, result


def _stages(url: str) -> Mapping[str, float]:
    """Seconds that the manager has spent in each stage so far."""
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 (the manager's own address)
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return {s.labels["stage"]: s.value for f in families for s in f.samples if s.name == _STAGES}


def _into_page_cache(directory: Path) -> None:
    buffer = bytearray(_READ_BYTES)
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
