"""`lorikeet bench`: loads that judge what they get."""

import asyncio
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lorikeet_admin.exits import ExitCode
from lorikeet_admin.local_stack import LocalStack, StackError, StackPlan
from lorikeet_admin.output import Output
from lorikeet_admin.session import Connection
from lorikeet_admin.soak_report import SoakProgressLine, fault_text, show_soak
from lorikeet_bench.soak import (
    Fault,
    SoakPlan,
    SoakResult,
    SoakTarget,
    WrongTargetError,
    run_soak,
    write_soak_base,
)

app = typer.Typer(no_args_is_help=True, help="Loads that judge what they get, token by token.")

_START_S = 180.0
_STOP_S = 30.0
# Sizes that make everything change hands: fewer slots, bytes and cached files than adapters, fewer blocks
# than the streams want, steps that cut long prompts.
_TIGHT_FLAGS = (
    *("--max-active-adapters", "8", "--adapter-arena-bytes", str(640 << 10)),
    *("--host-pool-bytes", str(2 << 20), "--disk-cache-bytes", str(4 << 20)),
    *("--max-running-requests", "48", "--max-step-tokens", "256", "--num-blocks", "120"),
)


@app.command()
def soak(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 6.0,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Requests open at any time.")] = 64,
    adapters: Annotated[int, typer.Option(min=1, max=99, help="Adapters that churn.")] = 32,
    seed: Annotated[int, typer.Option(help="What is asked and done; not when.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the whole result here as JSON.", dir_okay=False)
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="For services' data, logs and adapters; default: a new one, removed after a PASS."),
    ] = None,
    device: Annotated[str, typer.Option(help="Of the stack that is started: auto, cpu or cuda.")] = "cpu",
    running: Annotated[
        bool,
        typer.Option("--running", help="Soak the stack that --inference, --manager and --token name."),
    ] = False,
    tenant: Annotated[
        str, typer.Option(help="With --running: the token's tenant; it must be empty.")
    ] = "demo",
    pids: Annotated[
        list[str] | None,
        typer.Option(
            "--pid", metavar="NAME=PID", help="With --running: a service process to weigh; repeatable."
        ),
    ] = None,
) -> None:
    """Many streams over adapters that are pushed, replaced, loaded, unloaded, pinned and deleted meanwhile.

    Adapters force tokens that are known in advance, so that every token of every answer is checked
    against what its name meant when it was asked. PASS (exit code 0) needs: nothing wrong, nothing lost,
    every process flat within 2 % after the first minute, all counters and files back where they began.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} is no directory", param_hint="--json")
    output = Output(as_json=False)
    plan = SoakPlan(duration_s=60 * minutes, streams=streams, adapters=adapters, seed=seed)
    connection: Connection = context.obj
    target = _running_target(connection, tenant, pids or ()) if running else None
    with _directory(data_dir, output) as directory:
        try:
            result = (
                _soak(target, plan, directory, output)
                if target
                else _soak_own_stack(plan, directory, device, output)
            )
        except (StackError, WrongTargetError) as error:
            raise output.fail(str(error)) from error
        _report(result, json_file, output)


def _report(result: SoakResult, json_file: Path | None, output: Output) -> None:
    if json_file is not None:
        document = {"passed": result.has_passed, "failures": result.failures, **msgspec.to_builtins(result)}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    show_soak(output.console, result)
    if not result.has_passed:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def rig(
    directory: Annotated[
        Path, typer.Argument(file_okay=False, help="Where to write it.", show_default=False)
    ],
) -> None:
    """Write the tiny base model that `soak --running` needs the stack to serve."""
    write_soak_base(directory)
    Output(as_json=False).note(f"wrote {directory}; serve it, e.g. lorikeet up --model-dir {directory}")


@contextmanager
def _directory(data_dir: Path | None, output: Output) -> Generator[Path]:
    """The given directory, or a new one that stays only after a failure, for its logs."""
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield data_dir.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="lorikeet-soak-"))
    try:
        yield directory
    except typer.Exit:
        output.note(f"logs and data of this run stay in {directory}")
        raise
    shutil.rmtree(directory, ignore_errors=True)


def _soak_own_stack(plan: SoakPlan, directory: Path, device: str, output: Output) -> SoakResult:
    base = write_soak_base(directory / "base")
    stack = LocalStack(
        StackPlan(
            model_dir=base,
            data_dir=directory / "stack",
            inference_port=0,
            manager_port=0,
            device=device,
            dtype="float32",
            model_name="soak",
            tenant="soak",
            inference_flags=_TIGHT_FLAGS,
        )
    )
    try:
        ready = stack.start(_START_S, lambda: False)
        target = SoakTarget(
            inference=ready.inference,
            manager=ready.manager,
            token=ready.token,
            tenant="soak",
            processes={"front end" if name == "inference" else name: pid for name, pid in ready.pids.items()},
            disk={
                "node cache": ready.data_dir / "node",
                "artifacts": ready.data_dir / "manager" / "artifacts",
                "uploads": ready.data_dir / "manager" / "staging",
            },
        )
        return _soak(target, plan, directory, output)
    finally:
        stack.stop(_STOP_S)


def _soak(target: SoakTarget, plan: SoakPlan, directory: Path, output: Output) -> SoakResult:
    with SoakProgressLine(output.notes, plan.duration_s) as line, output.reported_errors():

        def on_fault(fault: Fault) -> None:
            line.print(fault_text(fault))

        return asyncio.run(run_soak(target, plan, directory / "adapters", line.update, on_fault))


def _running_target(connection: Connection, tenant: str, pids: Sequence[str]) -> SoakTarget:
    processes: dict[str, int] = {}
    for item in pids:
        name, _, pid = item.rpartition("=")
        if not name or not pid.isdigit():
            raise typer.BadParameter(f"{item!r} is not NAME=PID, e.g. manager=1234", param_hint="--pid")
        processes[name] = int(pid)
    return SoakTarget(
        inference=connection.inference,
        manager=connection.manager,
        token=connection.token,
        tenant=tenant,
        tls=connection.tls,
        processes=processes,
    )
