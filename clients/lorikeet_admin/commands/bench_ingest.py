"""`lorikeet bench ingest`: how fast a manager takes a large adapter, and in how much memory."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from lorikeet_admin.commands.bench_usage import check_file
from lorikeet_admin.exits import ExitCode
from lorikeet_admin.interruption import Interruption
from lorikeet_admin.local_stack import StackError, StackInterruptedError
from lorikeet_admin.lone_manager import lone_manager
from lorikeet_admin.output import Output
from lorikeet_admin.tables import plain_table
from lorikeet_bench.ingest import (
    AdapterLayout,
    IngestPlan,
    IngestResult,
    LayoutFigures,
    ManagerUnderTest,
    PeakMemoryError,
    StandInNode,
    gpt_oss_schema,
    measure_ingest,
)

_TENANT = "bench"
_STAGES = {
    "hash_s": "client: sha256",
    "send_s": "send + stage",
    "verify_s": "verify",
    "build_s": "INGEST",
    "register_s": "store + fsync",
    "rest_s": "rest",
    "total_s": "WHOLE PUSH",
}


def ingest(
    layout: Annotated[
        list[AdapterLayout] | None, typer.Option(help="How the experts lie; repeatable. Default: all.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Of every pair; 32 is 740 MB.")] = 32,
    repeat: Annotated[int, typer.Option(min=1, help="Pushes of each layout; medians are shown.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the whole result here as JSON.", dir_okay=False)
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where adapters and the manager's files go; default: a new one."),
    ] = None,
) -> None:
    """Push an adapter of gpt-oss-20b's shapes, made on the spot, to a manager of its own.

    INGEST is the manager's own step: the staged files are checked against the base model's schema and
    rewritten into the canonical payload. WHOLE PUSH is what `lorikeet adapters push` takes, from the first
    byte that the client hashes to the reply, when everything is on the disk and registered. PASS (exit code
    0) needs 400 MB/s of ingest from the page cache and less than 300 MB of memory in the manager at any time.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} is no directory", param_hint="--json")
    check_file(json_file, "--json")
    output = Output(as_json=False)
    plan = IngestPlan(tuple(dict.fromkeys(layout or AdapterLayout)), rank, repeat)
    place = Path(tempfile.mkdtemp(prefix="lorikeet-ingest-", dir=data_dir))
    interruption = Interruption()
    try:
        with interruption, output.reported_errors():
            result = _measure(plan, place, interruption, output)
    except (StackError, PeakMemoryError) as error:
        raise output.fail(str(error)) from error
    except StackInterruptedError as error:
        output.note(interruption.reason)
        raise typer.Exit(interruption.exit_code) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(_document(result)), indent=1) + b"\n")
    _show(output.console, result)
    if result.failures:
        raise typer.Exit(ExitCode.FAILED)


def _measure(plan: IngestPlan, place: Path, interruption: Interruption, output: Output) -> IngestResult:
    def step(text: str) -> None:
        if interruption:
            raise StackInterruptedError
        output.note(text)

    step("starting a manager")
    with (
        StandInNode(gpt_oss_schema(plan.shape), max_rank=plan.rank) as node,
        lone_manager(
            place / "manager", node.address, _TENANT, node.is_followed.is_set, lambda: bool(interruption)
        ) as manager,
    ):
        target = ManagerUnderTest(manager.address, manager.token, _TENANT, manager.pid, manager.metrics)
        return measure_ingest(target, plan, place, step)


def _document(result: IngestResult) -> dict[str, object]:
    rates = {
        figures.layout: {stage.removesuffix("_s"): round(figures.mb_s(stage), 1) for stage in _STAGES}
        for figures in result.layouts
    }
    return {
        "passed": not result.failures,
        "failures": result.failures,
        "median_mb_s": rates,
        **msgspec.to_builtins(result),
    }


def _show(console: Console, result: IngestResult) -> None:
    table = plain_table("layout", "MB", "tensors", "", *_STAGES.values(), "manager CPU s", "peak MB")
    for figures in result.layouts:
        table.add_row(
            *_facts(figures), "MB/s", *(_rate(figures, stage) for stage in _STAGES), "", _peak(figures)
        )
        seconds = (f"{figures.median_s(stage):.2f}" for stage in _STAGES)
        table.add_row("", "", "", "s", *seconds, f"{figures.median_s('manager_cpu_s'):.2f}", "")
    console.print(table)
    floors = result.floors
    console.print(
        f"floors, MB/s: sha256 of one core {floors.sha256_mb_s:.0f}, copy in memory "
        f"{floors.memory_copy_mb_s:.0f}, write {floors.write_mb_s:.0f}, write and fsync "
        f"{floors.write_and_sync_mb_s:.0f}"
    )
    for failure in result.failures:
        console.print(f"FAIL {failure}")
    if not result.failures:
        console.print("PASS")


def _facts(figures: LayoutFigures) -> tuple[str, str, str]:
    return figures.layout, f"{figures.weight_bytes / 1e6:.0f}", str(figures.tensors)


def _rate(figures: LayoutFigures, stage: str) -> str:
    return "" if figures.median_s(stage) < 0.01 else f"{figures.mb_s(stage):.0f}"


def _peak(figures: LayoutFigures) -> str:
    start = max(push.start_bytes for push in figures.pushes)
    return f"{figures.peak_bytes / 1e6:.0f} (before: {start / 1e6:.0f})"
