"""`lorikeet bench ingest` as people run it, with a small rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(180)
def test_pushes_are_measured_and_judged(tmp_path: Path) -> None:
    """Stages add up to the whole, memory stays below its bound, the verdict is the exit code, no file stays.

    How fast a busy machine is, is not asked: a slow one may fail the rate, and only that.
    """
    data, result_file = tmp_path / "data", tmp_path / "result.json"
    data.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lorikeet_admin", "bench", "ingest", "--rank", "2", "--repeat", "2"),
            *("--layout", "fused", "--json", str(result_file), "--data-dir", str(data)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result_file.exists(), done.stderr + done.stdout
    result = json.loads(result_file.read_text())
    assert result["passed"] == (done.returncode == 0)
    assert ("PASS" in done.stdout) == result["passed"]
    assert all("ingest at" in failure for failure in result["failures"])
    (fused,) = result["layouts"]
    assert fused["layout"] == "fused"
    assert fused["tensors"] == 288
    assert fused["weight_bytes"] > 46_000_000
    assert len(fused["pushes"]) == 2
    for push in fused["pushes"]:
        stages = [push[f"{stage}_s"] for stage in ("hash", "send", "verify", "build", "register")]
        assert all(seconds >= 0 for seconds in stages)
        assert min(push["hash_s"], push["send_s"], push["build_s"]) > 0
        assert sum(stages) <= push["total_s"] + 0.05
        assert push["start_bytes"] <= push["peak_bytes"] < 300_000_000
    assert not list(data.iterdir())
