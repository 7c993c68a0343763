"""What a script starts does not outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.child_processes import ENDED, run_within
from tests.support.fixtures import FIXTURES

ROOT = FIXTURES.parents[1]
# Starts a process of its own, as an engine does, and tells both ids.
PARENT = """
import os, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(f"{os.getpid()} {child.pid}")
part.rename(sys.argv[1])
child.wait()
"""
# As in a shell's foreground, wherever the tests run.
FOREGROUND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
ALONE = """
import sys
from benchmarks.child_processes import orderly_end, run_within
with orderly_end():
    run_within(sys.argv[1:], 60.0)
"""
AT_ONCE = """
import pathlib, sys
from benchmarks.child_processes import child_processes, orderly_end, wait_within
with orderly_end(), child_processes() as start:
    wait_within(start(sys.argv[1:], pathlib.Path(sys.argv[-1] + ".log")), 60.0)
"""


def is_running(pid: int) -> bool:
    """Neither gone nor waiting for its parent to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def are_gone(ids: list[int]) -> bool:
    """All of them, at once or in a moment: the kernel takes one to end what was killed."""
    until_s = time.monotonic() + 5.0
    while any(map(is_running, ids)) and time.monotonic() < until_s:
        time.sleep(0.02)
    return not any(map(is_running, ids))


def started_ids(file: Path) -> list[int]:
    """As soon as both run."""
    until_s = time.monotonic() + 30.0
    while not file.exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return [int(word) for word in file.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("script", [ALONE, AT_ONCE])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_that_was_started(
    tmp_path: Path, script: str, number: signal.Signals
) -> None:
    """With what those started; SIGTERM is told by the exit code."""
    file = tmp_path / "ids"
    line = [sys.executable, "-c", FOREGROUND + script, sys.executable, "-c", PARENT, str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL) as process:
        ids = started_ids(file)
        assert all(map(is_running, ids))
        process.send_signal(number)
        code = process.wait(30.0)
    assert are_gone(ids)
    assert code == (143 if number == signal.SIGTERM else -signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    """With all that it started."""
    file = tmp_path / "ids"
    assert run_within([sys.executable, "-c", PARENT, str(file)], 3.0) == ENDED
    assert are_gone(started_ids(file))
    assert run_within([sys.executable, "-c", "raise SystemExit(3)"], 30.0) == 3
