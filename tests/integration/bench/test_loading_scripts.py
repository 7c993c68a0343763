"""The scripts that measure loading, on models small enough for a test."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixtures import FIXTURES

BENCHMARKS = FIXTURES.parents[1] / "benchmarks"
SMALL = [
    f"--shape-set={item}"
    for item in ("vocab_size=1024", "hidden_size=64", "intermediate_size=64", "num_attention_heads=4")
]


def run(script: str, *options: str) -> dict[str, Any]:
    """The script's last line."""
    command = [sys.executable, str(BENCHMARKS / script), "--shape", "gpt-oss-20b", *SMALL, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights(tmp_path: Path, load_format: str) -> None:
    """A synthetic checkpoint with packed experts is written, loaded and deleted; dummy weights need none."""
    options = ("--layers", "2", "--load-format", load_format, "--scratch", str(tmp_path), "--cold")
    result = run("weight_load.py", *options)
    assert len(result["seconds"]) == 3
    assert (result["file_gb"] > 0) == (load_format == "auto")
    assert result["host_peak_gb"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_adapters(tmp_path: Path) -> None:
    """Payloads are written, read, copied and dropped."""
    result = run("adapter_load.py", "--rank", "4", "--scratch", str(tmp_path))
    assert result["sites"] == ["down", "gate_up", "k", "o", "q", "v"]
    assert result["adapter_mb"] > 0
    for key in ("page_cache_to_host_ms", "host_to_usable_ms", "page_cache_to_usable_ms"):
        assert 0 < result[key]["least"] <= result[key]["median"] <= result[key]["most"]
    assert list(tmp_path.iterdir()) == []
