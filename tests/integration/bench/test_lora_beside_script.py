"""The script that times LoRA's ways beside the base's GEMMs, on a toy: there it holds their bits alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.fixtures import FIXTURES

SCRIPT = FIXTURES.parents[1] / "benchmarks" / "lora_beside.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The script, to its end."""
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("shape", ["gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_all_ways_give_the_same_bits(shape: str, tmp_path: Path) -> None:
    """Packed and plain experts, shared ones, a dense layer: every way, one row and several, base rows."""
    file = tmp_path / "rows.json"
    small = ("--layers", "2", "--rank", "4", "--adapters", "2", "--rows", "1,5")
    done = run("--tiny", "--shape", shape, *small, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["device"] == "cpu"
    names = [row["name"].partition(": ")[2] for row in document["rows"]]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    assert {"none", "in a row", "dense and down", "all", "joined and down"} < {*names}
    assert all(row["same_bits"] for row in document["rows"])
    assert not any("value" in row for row in document["rows"])


def test_unknown_ways_are_wrong_usage() -> None:
    """The message says which there are."""
    done = run("--tiny", "--ways", "dense and sideways")
    assert done.returncode == 2
    assert "sideways: a way names some of dense, gate_up, down, joined" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_times_need_a_gpu() -> None:
    """Nothing is made before that is said."""
    done = run()
    assert done.returncode == 2
    assert "no NVIDIA GPU here" in done.stderr
