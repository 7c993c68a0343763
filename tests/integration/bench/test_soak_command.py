"""`lorikeet bench soak` as people run it, shorter and with fewer of everything."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
