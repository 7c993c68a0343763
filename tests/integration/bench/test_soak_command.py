"""`lorikeet bench soak` as people run it, shorter and with fewer of everything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


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
