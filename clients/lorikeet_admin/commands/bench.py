"""`lorikeet bench`: loads that judge what they get."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer

from lorikeet_admin.commands.bench_usage import check_file
from lorikeet_admin.exits import ExitCode
from lorikeet_admin.interruption import Interruption
from lorikeet_admin.local_stack import LocalStack, StackError, StackInterruptedError, StackPlan, StackReady
from lorikeet_admin.output import Output
from lorikeet_admin.session import Connection
from lorikeet_admin.soak_report import SoakProgressLine, fault_text, show_soak
from lorikeet_bench.soak import (
    CutShortError,
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
        typer.Option(
            file_okay=False,
            help="For services' data, logs and adapters; default: a new one, kept only after a FAIL.",
        ),
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
    clean: Annotated[
        bool, typer.Option("--clean", help="First delete the tenant's adapters named soak-NN.")
    ] = False,
) -> None:
    """Many streams over adapters that are pushed, replaced, loaded, unloaded, pinned and deleted meanwhile.

    Adapters force tokens that are known in advance, so that every token of every answer is checked
    against what its name meant when it was asked. PASS (exit code 0) needs: nothing wrong, nothing lost,
    every process flat within 2 % after the first minute, all counters and files back where they began.
    Ctrl-C and SIGTERM end it early: it deletes its adapters and shows what it has seen.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} is no directory", param_hint="--json")
    check_file(json_file, "--json")
    output = Output(as_json=False)
    plan = SoakPlan(duration_s=60 * minutes, streams=streams, adapters=adapters, seed=seed)
    connection: Connection = context.obj
    target = _running_target(connection, tenant, pids or (), output) if running else None
    with Interruption() as interruption, _directory(data_dir, output) as place:
        run = _Run(plan, place.path, interruption, output, clean=clean)
        try:
            result = run.on(target) if target else run.on_own_stack(device)
        except (CutShortError, StackInterruptedError) as error:
            output.note(f"{interruption.reason} before the load began")
            raise typer.Exit(interruption.exit_code) from error
        except WrongTargetError as error:
            raise output.fail(str(error)) from error
        except StackError as error:
            place.is_kept = True
            raise output.fail(str(error)) from error
        # Nobody else has the logs of a stack of our own.
        place.is_kept = not target and not result.has_passed and not interruption
        _report(result, json_file, output, interruption)


def _report(result: SoakResult, json_file: Path | None, output: Output, interruption: Interruption) -> None:
    if json_file is not None:
        document = {"passed": result.has_passed, "failures": result.failures, **msgspec.to_builtins(result)}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    show_soak(output.console, result, interrupted=bool(interruption))
    if interruption:
        raise typer.Exit(interruption.exit_code)
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


@dataclass(slots=True)
class _Place:
    """The directory of a run; a new one is removed at its end unless it `is_kept`."""

    path: Path
    is_kept: bool = False


@contextmanager
def _directory(data_dir: Path | None, output: Output) -> Generator[_Place]:
    """The given directory, or a new one."""
    if data_dir is not None:
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=data_dir):
                pass
        except OSError as error:
            raise typer.BadParameter(
                f"cannot write to {data_dir}: {error.strerror}", param_hint="--data-dir"
            ) from error
        yield _Place(data_dir.resolve())
        return
    place = _Place(Path(tempfile.mkdtemp(prefix="lorikeet-soak-")))
    try:
        yield place
    finally:
        if place.is_kept:
            output.note(f"logs and data of this run stay in {place.path}")
        else:
            shutil.rmtree(place.path, ignore_errors=True)


def _own_stack(directory: Path, device: str) -> LocalStack:
    base = write_soak_base(directory / "base")
    return LocalStack(
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


@dataclass(frozen=True, slots=True)
class _Run:
    """One soak, in one directory."""

    plan: SoakPlan
    directory: Path
    interruption: Interruption
    output: Output
    clean: bool

    def on(self, target: SoakTarget, gone: Callable[[], str] = lambda: "") -> SoakResult:
        """Soak what runs, until `gone` says that it does not any more."""
        with SoakProgressLine(self.output.notes, self.plan.duration_s) as line, self.output.reported_errors():

            def on_fault(fault: Fault) -> None:
                line.print(fault_text(fault))

            def ended_early() -> str:
                return self.interruption.reason or gone()

            adapters = self.directory / "adapters"
            return asyncio.run(
                run_soak(target, self.plan, adapters, line.update, on_fault, ended_early, clean=self.clean)
            )

    def on_own_stack(self, device: str) -> SoakResult:
        """Start a stack, soak it, stop it."""
        stack = _own_stack(self.directory, device)

        def gone() -> str:
            try:
                stack.check()
            except StackError as error:
                return f"the service went away: {error}"
            return ""

        try:
            ready = stack.start(_START_S, lambda: bool(self.interruption))
            return self.on(_own_target(ready), gone)
        finally:
            stack.stop(_STOP_S)


def _own_target(ready: StackReady) -> SoakTarget:
    return SoakTarget(
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


def _running_target(connection: Connection, tenant: str, pids: Sequence[str], output: Output) -> SoakTarget:
    try:
        connection.client().close()
    except (ValueError, OSError) as error:  # a token no header can carry; an unreadable TLS file
        raise output.fail(str(error)) from error
    processes: dict[str, int] = {}
    for item in pids:
        name, _, pid = item.rpartition("=")
        if not name or not (pid.isascii() and pid.isdecimal()):
            raise typer.BadParameter(f"{item!r} is not NAME=PID, e.g. manager=1234", param_hint="--pid")
        try:
            processes[name] = psutil.Process(int(pid)).pid
        except (psutil.Error, ValueError) as error:
            raise typer.BadParameter(f"no process has the id {pid}", param_hint="--pid") from error
    return SoakTarget(
        inference=connection.inference,
        manager=connection.manager,
        token=connection.token,
        tenant=tenant,
        tls=connection.tls,
        processes=processes,
    )
