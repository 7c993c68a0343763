"""Runs a bench's coroutine on a fast event loop; SIGTERM ends it as Ctrl-C does, with everything closed."""

import asyncio
import signal
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import typer
import uvloop

T = TypeVar("T")


@contextmanager
def orderly_end() -> Generator[None]:
    """SIGTERM leaves through everything that was entered, with the exit code that shells have for it."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise typer.Exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_bench(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        Exit: SIGTERM; with the code that shells have for it.
    """
    is_terminated = False

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal is_terminated
            is_terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await work

    before = signal.getsignal(signal.SIGTERM)
    try:
        return uvloop.run(main())
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        raise typer.Exit(128 + signal.SIGTERM) from None
    finally:
        # The loop leaves the default behind, which ends a process on the spot.
        signal.signal(signal.SIGTERM, before)
