"""`lorikeet bench soak` as people run it, shorter and with fewer of everything."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorikeet.adapters.v1 import adapter_pb2
from lorikeet_bench.rigs import write_moe_watermark
from lorikeet_bench.soak import write_soak_base
from lorikeet_bench.soak.plan import SOAK_SHAPE
from tests.support.stack import Stack


def soak_command(root: Path, seconds: float, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run `lorikeet bench soak` with a stack of its own: exit code, its JSON, what it printed."""
    result_file = root / "soak.json"
    minutes = str(seconds / 60)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lorikeet_admin", "bench", "soak", "--minutes", minutes),
            *("--json", str(result_file), "--data-dir", str(root / "data"), *options),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result_file.exists(), done.stderr + done.stdout
    return done.returncode, json.loads(result_file.read_text()), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_running_stack_is_soaked_and_judged_fit_for_it(tmp_path: Path) -> None:
    """Its processes are weighed by the given ids; adapters of others, or another model, are refused."""
    async with Stack(write_soak_base(tmp_path / "base"), tmp_path / "stack") as stack:
        assert stack.node.popen is not None
        assert stack.manager.popen is not None
        command = [
            *(sys.executable, "-m", "lorikeet_admin", "--inference", stack.node_address),
            *("--manager", stack.manager_address, "--token", stack.token, "bench", "soak", "--running"),
            *("--minutes", "0.05", "--streams", "8", "--adapters", "4"),
            *("--pid", f"node={stack.node.popen.pid}", "--pid", f"manager={stack.manager.popen.pid}"),
        ]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        assert all(f"\n {name} " in done.stdout for name in ("node", "engine", "manager", "store"))
        await stack.upload(write_moe_watermark(tmp_path / "other", 5, SOAK_SHAPE), "demo/other")
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "demo has adapters" in done.stderr
        command += ["--tenant", "nobody"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "--tenant must name" in done.stderr
        assert "hint:" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_soak_that_ends_early_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """Killed, the next one is told how to go on; a signal and a node that is gone both end it in order."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    async with Stack(write_soak_base(tmp_path / "base"), tmp_path / "stack") as stack:

        async def start(*options: str) -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lorikeet_admin", "--inference", stack.node_address),
                *("--manager", stack.manager_address, "--token", stack.token, "bench", "soak", "--running"),
                *("--minutes", "60", "--streams", "4", "--adapters", "2", *options),
                env={**os.environ, "TMPDIR": str(scratch)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )

        async def soaking(process: asyncio.subprocess.Process) -> None:
            assert process.stderr
            while b"soaking" not in (line := await process.stderr.readline()):
                assert line, "it ended before the load began"

        async def left() -> list[str]:
            request = adapter_pb2.ListAdaptersRequest(parent="tenants/demo")
            found = await stack.adapters().ListAdapters(request, metadata=stack.auth(), timeout=30)
            return sorted(adapter.name for adapter in found.adapters)

        killed = await start()
        await soaking(killed)
        killed.kill()
        await killed.wait()
        refused = await start()
        _, err = await refused.communicate()
        assert (refused.returncode, b"--clean deletes" in err) == (1, True), err
        left_by_the_killed = list(scratch.iterdir())
        assert len(left_by_the_killed) == 1
        for number in (signal.SIGINT, signal.SIGTERM):
            interrupted = await start("--clean")
            await soaking(interrupted)
            interrupted.send_signal(number)
            out, err = await interrupted.communicate()
            assert interrupted.returncode == 128 + number, err
            assert f"INTERRUPTED: interrupted by {number.name}" in out.decode()
            assert await left() == []
        bereft = await start()
        await soaking(bereft)
        stack.node.kill()
        out, err = await bereft.communicate()
        assert bereft.returncode == 1, err
        assert b"FAIL: the service went away: the inference service at" in out
        assert list(scratch.iterdir()) == left_by_the_killed


@pytest.mark.timeout(240)
async def test_a_stack_of_its_own_that_ends_is_noticed(tmp_path: Path) -> None:
    """Its front end is killed: the soak ends, with the place of the logs."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lorikeet_admin", "bench", "soak", "--minutes", "60"),
        *("--streams", "4", "--adapters", "2"),
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr
    while b"soaking" not in (line := await process.stderr.readline()):
        assert line, "it ended before the load began"
    front = next(
        child
        for child in psutil.Process(process.pid).children()
        if "inference_service" in " ".join(child.cmdline())
    )
    front.kill()
    out, err = await process.communicate()
    assert process.returncode == 1, err
    assert b"FAIL: the service went away: inference was ended by signal 9" in out
    (kept,) = scratch.glob("lorikeet-soak-*")
    assert f"stay in {kept}" in err.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--running", "--pid", "x=999999999"),
        ("--running", "--pid", "x=99999999999999999999"),
        ("--running", "--pid", "999"),
        ("--data-dir", "/dev/null"),
        ("--data-dir", "/dev/null/x"),
    ],
)
def test_arguments_that_cannot_be(arguments: tuple[str, ...]) -> None:
    """Told before anything is started."""
    done = subprocess.run(
        [sys.executable, "-m", "lorikeet_admin", "bench", "soak", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert arguments[-2] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(240)
def test_a_short_soak_passes(tmp_path: Path) -> None:
    """The command as people run it, with fewer of everything."""
    code, result, output = soak_command(tmp_path, 8, "--streams", "24", "--adapters", "12")
    assert (code, result["passed"], result["failures"]) == (0, True, []), output
    assert (result["wrong"], result["lost"]) == (0, 0)
    assert result["streams_open_at_most"] == 24
    assert result["levels_before"] == result["levels_after"]
    assert "\nPASS\n" in output
    weighed = {trend["process"] for trend in result["memory"]}
    assert {"front end", "engine", "manager", "store"} <= weighed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_soak_of_half_a_minute_meets_everything(tmp_path: Path) -> None:
    """All operations, all ends; slots, bytes and blocks change hands, and some requests are preempted."""
    code, result, output = soak_command(tmp_path, 30, "--streams", "48", "--adapters", "24")
    assert (code, result["failures"]) == (0, []), output
    operations = {"create", "replace", "push again", "delete", "unload", "load to active", "pin", "look"}
    assert operations <= set(result["churn"])
    ends = {"finished: length", "NOT_FOUND", "left: cancel", "left: disconnect", "DEADLINE_EXCEEDED"}
    assert ends <= set(result["streams"])
    grown = {name for name, count in result["growth"].items() if count}
    assert {"adapter loads", "adapter evictions", "prefix hit tokens"} <= grown
