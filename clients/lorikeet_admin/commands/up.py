"""`lorikeet up`: a local stack in the foreground."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lorikeet_admin.local_stack import LocalStack, StackError, StackInterruptedError, StackPlan, StackReady
from lorikeet_admin.output import Output
from lorikeet_admin.session import Json

_WATCH_S = 0.2


def up(
    model_dir: Annotated[
        Path,
        typer.Option(
            envvar="INFERENCE_MODEL_DIR",
            exists=True,
            file_okay=False,
            help="Hugging Face directory of the model.",
        ),
    ],
    data_dir: Annotated[
        Path, typer.Option(file_okay=False, help="Registry, adapters, caches and logs; kept between runs.")
    ] = Path("lorikeet-data"),
    inference_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 50051,
    manager_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 50052,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto: cuda where torch sees a GPU.")
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float32, bfloat16 or float16; auto: the checkpoint's on a GPU, float32 on a CPU."
        ),
    ] = "auto",
    model_name: Annotated[str, typer.Option(help="Name shown to clients; default: the directory's.")] = "",
    tenant: Annotated[str, typer.Option(help="The tenant made on the first run.")] = "demo",
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds until both must serve.")] = 180.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests when stopping.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Run both services until Ctrl-C or SIGTERM; ends non-zero if one of them dies.

    INFERENCE_... and ADAPTER_MANAGER_... variables reach the services, for settings that have no option here.
    """
    output = Output(as_json=as_json)
    plan = StackPlan(
        model_dir.resolve(),
        data_dir.resolve(),
        inference_port,
        manager_port,
        device,
        dtype,
        model_name,
        tenant,
    )
    stop = threading.Event()
    stack = LocalStack(plan)
    _stop_on_signals(stop, stack)
    try:
        _serve(stack, output, startup_timeout, stop)
        output.note("stopping")
    except StackError as error:
        raise output.fail(str(error)) from error
    finally:
        clean = stack.stop(grace)
    if not clean:
        raise output.fail(f"a service did not stop within {grace:g} s and was killed")
    output.note("stopped")


def _serve(stack: LocalStack, output: Output, startup_timeout: float, stop: threading.Event) -> None:
    """Start the stack, say where it is, and watch it until `stop` is set."""
    try:
        ready = stack.start(startup_timeout, stop.is_set)
    except StackInterruptedError:
        return
    output.result(ready, lambda console: _show_ready(console, ready))
    while not stop.wait(_WATCH_S):
        stack.check()


def _stop_on_signals(stop: threading.Event, stack: LocalStack) -> None:
    def on_signal(_number: int, _frame: object) -> None:
        if stop.is_set():  # asked twice: do not wait for the grace period
            stack.kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def _show_ready(console: Console, ready: StackReady) -> None:
    console.print(f"Lorikeet serves {ready.model}; Ctrl-C stops it.")
    for name, log in ready.logs.items():
        console.print(f"  {name:9} log {log}", soft_wrap=True)
    console.print(f"  data      {ready.data_dir}\n\nIn another shell:\n", soft_wrap=True)
    for variable, value in (
        ("INFERENCE", ready.inference),
        ("MANAGER", ready.manager),
        ("TOKEN", ready.token),
    ):
        console.print(f"export LORIKEET_{variable}={value}", soft_wrap=True)
