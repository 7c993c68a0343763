"""Commands in sessions of their own: none of what they start outlives a script's end or interruption."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

ENDED = 124  # the exit code of what took too long, as of `timeout`
GRACE_S = 10.0

Process = subprocess.Popen[bytes]
Start = Callable[[Sequence[str], Path | None], Process]


@contextmanager
def orderly_end() -> Generator[None]:
    """SIGTERM leaves through everything that was entered, with the exit code that shells have for it."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def child_processes() -> Generator[Start]:
    """Starts commands, with a file for what they print or none; leaving ends all that still runs of them."""
    processes: list[Process] = []

    def start(line: Sequence[str], printed: Path | None) -> Process:
        if printed is None:
            processes.append(subprocess.Popen(line, start_new_session=True))
        else:
            with printed.open("wb") as log:
                processes.append(
                    subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        return processes[-1]

    try:
        yield start
    finally:
        _end(processes)


def run_within(line: Sequence[str], seconds: float) -> int:
    """Run a command for so long at most; its exit code, or `ENDED`."""
    with child_processes() as start:
        return wait_within(start(line, None), seconds)


def wait_within(process: Process, seconds: float) -> int:
    """A process's exit code, or `ENDED` if it still runs after so long: who started it ends it."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return ENDED


def _end(processes: Sequence[Process]) -> None:
    """The first of each session has time to end in order; then nothing is left of any, interrupted or not."""
    try:
        _signal(processes, signal.SIGTERM)
    finally:
        _signal(processes, signal.SIGKILL)


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, number)
    until_s = time.monotonic() + GRACE_S
    for process in processes:
        wait_within(process, max(0.0, until_s - time.monotonic()))
